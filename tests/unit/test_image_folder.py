"""Image days: whatever is not a whole picture is a hole with a reason; the rest is upright RGB."""

from __future__ import annotations

import importlib.util
import io
import mmap
import os
import struct
import subprocess
import sys
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageFile, WebPImagePlugin

from gpu_runtime.datasets.decode import decode_image
from gpu_runtime.datasets.image_folder import ImageFolderSource
from gpu_runtime.datasets.partition import numpy_rows
from gpu_runtime.errors import DatasetError, SpecError
from gpu_runtime.specs import TensorSpec

DAY = "2026-03-01"
PIXELS = TensorSpec("pixels", "uint8", (8, 8, 3))
RED, BLUE = (200, 30, 30), (30, 30, 200)
Rows = tuple[Any, dict[str, tuple[str, str]]]


def source_of(root: Path, **settings: Any) -> ImageFolderSource:
    return ImageFolderSource(str(root), (PIXELS,), **{"crop_fraction": 1.0, **settings})


def read(root: Path) -> Rows:
    """Pixels `[n, 8, 8, 3]`, and file → (stage, reason) of those that failed."""
    source = source_of(root)
    rows, failures, reader = numpy_rows(source, source.partition(DAY).shards[0])
    return rows["pixels"], {
        reader.origins(f.row, f.row + 1)["row_key"][0].as_py(): (f.stage, f.reason) for f in failures
    }


def land(root: Path, file: str, content: Any, kind: str | None = None, **save: Any) -> Path:
    """A file of the day, from bytes or from a picture."""
    path = root / DAY / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Image.Image):
        content.save(path, kind, **save)
    else:
        path.write_bytes(content)
    return path


def encoded(image: Any, kind: str, **save: Any) -> bytearray:
    stream = io.BytesIO()
    image.save(stream, kind, **save)
    return bytearray(stream.getvalue())


def chunk(kind: bytes, data: bytes) -> bytes:
    """A PNG chunk with its checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes, *, bits: int = 8, extra: bytes = b"") -> bytes:
    """An RGB PNG from its bytes; `extra` chunks stand before the pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + extra + pixels + chunk(b"IEND", b"")


def halves(row: Any) -> tuple[Any, Any]:
    """The colours well inside the left and the right half."""
    return row[3, 1].astype(int), row[3, 6].astype(int)


def test_a_jpeg_becomes_rgb_pixels(tmp_path: Path, write_jpeg: Any) -> None:
    write_jpeg(tmp_path / DAY / "a.jpg", RED, BLUE)
    pixels, failures = read(tmp_path)
    left, right = halves(pixels[0])
    np.testing.assert_allclose(left, RED, atol=12)
    np.testing.assert_allclose(right, BLUE, atol=12)
    assert failures == {}


@pytest.mark.parametrize(
    ("mode", "colour", "file", "expected"),
    [
        ("L", 100, "a.png", (100, 100, 100)),
        ("LA", (100, 50), "a.png", (100, 100, 100)),
        ("RGBA", (10, 20, 30, 40), "a.png", (10, 20, 30)),
        ("1", 1, "a.png", (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), "a.jpg", (255, 0, 0)),
        ("I;16", 0x8000, "a.png", (128, 128, 128)),
        ("I;16", 0xFFFF, "a.png", (255, 255, 255)),
    ],
)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str, colour: Any, file: str, expected: Any) -> None:
    (tmp_path / DAY).mkdir()
    Image.new(mode, (16, 16), colour).save(tmp_path / DAY / file)
    pixels, failures = read(tmp_path)
    assert failures == {}
    np.testing.assert_allclose(pixels[0, 4, 4].astype(int), expected, atol=3)


def test_a_palette_becomes_its_colours(tmp_path: Path) -> None:
    (tmp_path / DAY).mkdir()
    Image.new("RGB", (16, 16), RED).quantize(4).save(tmp_path / DAY / "a.png")
    pixels, _ = read(tmp_path)
    np.testing.assert_allclose(pixels[0, 4, 4].astype(int), RED, atol=3)


def palette(transparency: Any) -> Any:
    image = Image.new("RGB", (16, 16), RED).quantize(4)
    image.info["transparency"] = transparency
    return image


@pytest.mark.parametrize("transparency", [0, bytes([7, 0, 255])], ids=["one colour", "an alpha a colour"])
def test_a_palette_with_transparency_becomes_its_colours(tmp_path: Path, transparency: Any) -> None:
    land(tmp_path, "a.png", palette(transparency))
    pixels, failures = read(tmp_path)
    assert failures == {}
    np.testing.assert_allclose(pixels[0, 4, 4].astype(int), RED, atol=3)


def test_sixteen_bits_a_colour_become_eight(tmp_path: Path) -> None:
    row = b"\0" + struct.pack(">3H", 0xC8FF, 0x1000, 0x2080) * 16
    land(tmp_path, "a.png", png(16, 16, row * 16, bits=16))
    assert read(tmp_path)[0][0, 4, 4].tolist() == [0xC8, 0x10, 0x20]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_of_an_animation_the_first_picture_is_taken(tmp_path: Path, kind: str) -> None:
    first, second = (Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE))
    land(tmp_path, "a.png", first, kind, save_all=True, append_images=[second], duration=50, lossless=True)
    pixels, failures = read(tmp_path)
    assert (pixels[0, 4, 4].tolist(), failures) == (list(RED), {})


UPRIGHT = np.random.default_rng(0).integers(0, 256, (24, 16, 3)).astype(np.uint8)
STORED = {  # orientation → how a camera stores the upright picture
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.transpose(1, 0, 2),
    6: lambda upright: np.rot90(upright),
    7: lambda upright: np.rot90(upright, 2).transpose(1, 0, 2),
    8: lambda upright: np.rot90(upright, -1),
    0: lambda upright: upright,  # 0 and 9 mean nothing
    9: lambda upright: upright,
}


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("orientation", STORED)
def test_a_picture_gives_the_same_row_however_the_camera_was_held(tmp_path: Path, orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](UPRIGHT)))
    land(tmp_path, "held.png", stored, kind, exif=exif, lossless=True)
    land(tmp_path, "upright.png", Image.fromarray(UPRIGHT))
    pixels, failures = read(tmp_path)
    assert failures == {}
    np.testing.assert_array_equal(pixels[0], pixels[1])


@pytest.mark.parametrize("orientation", [3, 6])
def test_a_jpeg_taken_sideways_is_turned_upright(tmp_path: Path, write_jpeg: Any, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    write_jpeg(tmp_path / DAY / "a.jpg", RED, BLUE, exif=exif)
    pixels, _ = read(tmp_path)
    shown = {3: halves(pixels[0]), 6: halves(pixels[0].transpose(1, 0, 2))}[orientation]  # 6: left is now above
    np.testing.assert_allclose(shown, {3: (BLUE, RED), 6: (RED, BLUE)}[orientation], atol=12)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_damaged_exif_data_turn_nothing(tmp_path: Path, kind: str) -> None:
    land(tmp_path, "a.png", Image.new("RGB", (16, 16), RED), kind, exif=b"Exif\0\0no directory of tags")
    pixels, failures = read(tmp_path)
    assert failures == {}
    np.testing.assert_allclose(pixels[0, 4, 4].astype(int), RED, atol=3)


def test_a_reduced_jpeg_keeps_what_the_target_can_show(tmp_path: Path) -> None:
    """A wide picture and a wide, low input: the low side must not decide how far the JPEG is reduced."""
    stripes = np.zeros((200, 1600, 3), np.uint8)
    stripes[:, np.arange(1600) // 8 % 2 == 0] = 250
    land(tmp_path, "a.jpg", Image.fromarray(stripes), quality=95)
    land(tmp_path, "b.png", Image.fromarray(stripes))
    source = replace(source_of(tmp_path), inputs=(TensorSpec("pixels", "uint8", (8, 64, 3)),))
    rows, _, _ = numpy_rows(source, source.partition(DAY).shards[0])
    jpeg, lossless = rows["pixels"].astype(int)
    assert abs(jpeg - lossless).max() < 40


def test_the_centre_square_is_taken(tmp_path: Path) -> None:
    wide = np.zeros((16, 64, 3), np.uint8)
    wide[:, 24:40] = 250
    (tmp_path / DAY).mkdir()
    Image.fromarray(wide).save(tmp_path / DAY / "a.png")
    assert read(tmp_path)[0][0, :, 1:-1].min() == 250


def test_the_crop_fraction_leaves_the_border_out(tmp_path: Path) -> None:
    framed = np.zeros((64, 64, 3), np.uint8)
    framed[8:56, 8:56] = 250
    (tmp_path / DAY).mkdir()
    Image.fromarray(framed).save(tmp_path / DAY / "a.png")
    source = source_of(tmp_path, crop_fraction=0.75)
    rows, _, _ = numpy_rows(source, source.partition(DAY).shards[0])
    assert rows["pixels"].min() > 150
    assert read(tmp_path)[0].min() < 50


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.9, 0.99])
def test_a_truncated_picture_is_a_hole_and_never_half_grey(tmp_path: Path, kept: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3)).astype(np.uint8)
    (tmp_path / DAY).mkdir()
    path = tmp_path / DAY / "a.jpg"
    Image.fromarray(noise).save(path, quality=95)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    pixels, failures = read(tmp_path)
    assert failures == {"a.jpg": ("decode", "not a whole picture")}
    assert not pixels.any()


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8))


@pytest.mark.parametrize("kept", [0.02, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP"])
def test_a_truncated_picture_of_any_format_is_a_hole(tmp_path: Path, kind: str, kept: float) -> None:
    whole = encoded(NOISE, kind)
    land(tmp_path, "a.png", whole[: int(kept * len(whole))])
    assert read(tmp_path)[1] == {"a.png": ("decode", "not a whole picture")}


@pytest.mark.parametrize("ends_with", [b"\0\0\0\0IEND\xaeB`\x82", b"IEND\xaeB`\x82"])
def test_a_png_without_its_end_is_a_hole(tmp_path: Path, ends_with: bytes) -> None:
    land(tmp_path, "a.png", encoded(NOISE, "PNG").removesuffix(ends_with))
    assert read(tmp_path)[1] == {"a.png": ("decode", "not a whole picture")}


def test_a_png_whose_pixels_fail_their_checksum_is_a_hole(tmp_path: Path) -> None:
    whole = encoded(NOISE, "PNG")
    pixels = whole.index(b"IDAT")
    whole[whole.index(b"IEND") - 5] ^= 1  # the checksum's last byte: Pillow alone would not notice
    Image.open(io.BytesIO(whole)).load()
    land(tmp_path, "a.png", whole)
    flipped = encoded(NOISE, "PNG", compress_level=0)
    flipped[pixels + 200] ^= 1
    land(tmp_path, "b.png", flipped)
    assert read(tmp_path)[1] == dict.fromkeys(("a.png", "b.png"), ("decode", "not a whole picture"))


UNKNOWN = "not a JPEG, PNG, WebP or BMP picture"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"<html>not found</html>", UNKNOWN),
        (b"RIFF\0\0\0\0WAVE", UNKNOWN),
        (encoded(NOISE, "GIF"), UNKNOWN),
        (encoded(NOISE, "EPS"), UNKNOWN),  # Pillow would start Ghostscript
        (b"\xff\xd8\xff", "not a whole picture"),
        (b"RIFF\0\0\0\0WEBPVP8?" + bytes(40), "not a whole picture"),
        (b"BM", "not a whole picture"),
        (png(0, 16, b""), "not a whole picture"),
    ],
    ids=["empty", "page", "sound", "GIF", "EPS", "JPEG", "WebP", "BMP", "no width"],
)
def test_what_is_no_picture_is_a_hole(tmp_path: Path, write_jpeg: Any, content: bytes, reason: str) -> None:
    write_jpeg(tmp_path / DAY / "a.jpg", RED, RED)
    land(tmp_path, "b.jpg", content)
    write_jpeg(tmp_path / DAY / "c.jpg", BLUE, BLUE)
    pixels, failures = read(tmp_path)
    assert failures == {"b.jpg": ("decode", reason)}
    np.testing.assert_allclose(pixels[:, 4, 4].astype(int), [RED, (0, 0, 0), BLUE], atol=12)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
def test_the_name_does_not_say_what_a_file_holds(tmp_path: Path, kind: str) -> None:
    for suffix in ("jpg", "png", "webp", "bmp", "JPEG"):
        land(tmp_path, f"a.{suffix}", Image.new("RGB", (16, 16), RED), kind)
    pixels, failures = read(tmp_path)
    assert failures == {}
    np.testing.assert_allclose(pixels[:, 4, 4].astype(int), [RED] * 5, atol=6)


def huge(kind: str, side: int) -> bytes:
    """A small picture whose header claims `side` × `side` pixels."""
    if kind == "PNG":
        return png(side, side, b"\0" * 64)
    save = {"WEBP VP8L": {"lossless": True}, "WEBP VP8X": {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}}.get(kind, {})
    data = encoded(Image.new("RGB", (16, 16)), kind.split()[0], **save)
    if kind == "JPEG":
        struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, side, side)
    if kind == "BMP":
        struct.pack_into("<ii", data, 18, side, -side)
    if kind.startswith("WEBP"):
        assert bytes(data[12:16]).decode().strip() == kind.split()[1]
    if kind == "WEBP VP8":
        struct.pack_into("<HH", data, 26, side, side)
    if kind == "WEBP VP8L":
        struct.pack_into("<I", data, 21, side - 1 | side - 1 << 14)
    if kind == "WEBP VP8X":
        data[24:30] = (side - 1).to_bytes(3, "little") * 2
    return bytes(data)


@pytest.mark.parametrize(
    ("kind", "sides"),
    [
        ("JPEG", (8_001, 10_000, 65_535)),
        ("PNG", (8_001, 10_000, 2**31 - 1)),
        ("BMP", (8_001, 10_000, 2**31 - 1)),
        ("WEBP VP8", (8_001, 10_000, 16_383)),
        ("WEBP VP8L", (8_001, 10_000, 16_384)),
        ("WEBP VP8X", (8_001, 10_000, 2**24)),
    ],
)
def test_a_picture_of_too_many_pixels_takes_no_memory(
    tmp_path: Path, kind: str, sides: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below, between and above the limits at which Pillow warns and raises."""
    for side in sides:
        land(tmp_path, f"{side}.jpg", huge(kind, side))
    for owner, name in (
        (ImageFile.ImageFile, "load"),
        (WebPImagePlugin.WebPImageFile, "load"),
        (WebPImagePlugin._webp, "WebPAnimDecoder"),
    ):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("decoded"))
    reason = ("decode", "more than 64000000 pixels")
    assert read(tmp_path)[1] == {f"{side}.jpg": reason for side in sides}


@pytest.mark.parametrize(
    "extra",
    [
        chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**26))),
        chunk(b"iTXt", b"k\0\1\0\0\0" + zlib.compress(bytes(2**26))),
        chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(2**26))),
    ],
    ids=["zTXt", "iTXt", "iCCP"],
)
def test_metadata_that_unpack_to_much_are_refused(tmp_path: Path, extra: bytes) -> None:
    land(tmp_path, "a.png", png(16, 16, (b"\0" + bytes(48)) * 16, extra=extra))
    assert read(tmp_path)[1] == {"a.png": ("decode", "not a whole picture")}


def test_a_file_too_large_for_any_picture_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with land(tmp_path, "a.jpg", b"\xff\xd8\xff").open("r+b") as sparse:
        sparse.truncate(512_000_001)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("read"))
    assert read(tmp_path)[1] == {"a.jpg": ("decode", "more than 512000000 bytes")}


def test_a_jpeg_of_endless_scans_is_refused_undecoded(tmp_path: Path) -> None:
    scans = encoded(NOISE, "JPEG", progressive=True)
    last = scans.rindex(b"\xff\xda")
    land(tmp_path, "a.jpg", scans[:-2] + scans[last:-2] * 1_000 + scans[-2:])
    land(tmp_path, "b.jpg", scans)
    assert read(tmp_path)[1] == {"a.jpg": ("decode", "more than 1000 scans")}


def test_rotten_files_print_nothing(tmp_path: Path) -> None:
    land(tmp_path, "bytes.png", palette(bytes([7, 0, 255])))
    land(tmp_path, "large.bmp", huge("BMP", 10_000))
    land(tmp_path, "tags.jpg", Image.new("RGB", (16, 16)), exif=b"Exif\0\0II*\0\x08\0\0\0\x09\0")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        read(tmp_path)
    assert seen == []


def test_no_file_is_mapped_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file that is cut short meanwhile ends the process."""
    land(tmp_path, "a.bmp", Image.new("L", (16, 16), 100))
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: pytest.fail("mapped"))
    assert read(tmp_path)[0][0, 4, 4].tolist() == [100] * 3


def smooth(width: int, height: int, seed: int = 0) -> Image.Image:
    """Blurred spots of colour: like a photo, neighbours are alike."""
    spots = np.random.default_rng(seed).integers(0, 256, (12, 12, 3)).astype(np.uint8)
    return Image.fromarray(spots).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("save", [{}, {"progressive": True}, {"optimize": True}], ids=str)
@pytest.mark.parametrize("tail", ["zeros", "noise"])
def test_a_jpeg_whose_second_half_was_overwritten_is_a_hole(tmp_path: Path, save: dict[str, Any], tail: str) -> None:
    """As a copy that was interrupted leaves it: of the right length, with the right end."""
    for seed in range(5):
        path = land(tmp_path, f"{seed}.jpg", smooth(320, 240, seed), "JPEG", quality=85, **save)
        data = bytearray(path.read_bytes())
        middle = slice(len(data) // 2, len(data) - 2)
        noise = np.random.default_rng(seed).integers(0, 255, len(data[middle])).astype(np.uint8).tobytes()
        data[middle] = noise if tail == "noise" else bytes(len(noise))
        path.write_bytes(data)
    _, failures = read(tmp_path)
    assert list(failures.values()) == [("decode", "not a whole picture")] * 5


@pytest.mark.parametrize("scale", [0.2, 0.6, 1.0, 4.0])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("photo", ["chelsea.png", "coffee.png", "rocket.jpg"])
def test_pixels_are_those_of_the_whole_picture_cut_and_averaged(
    tmp_path: Path, photo: str, kind: str, scale: float
) -> None:
    """The reference: decoded whole, its centre square taken, resized by Pillow with antialiasing. Within 2.5 of 255 on
    average, and all but one value in a hundred within 16."""
    found = importlib.util.find_spec("skimage")
    assert found is not None and found.origin is not None
    source = Path(found.origin).parent / "data" / photo
    with Image.open(source) as opened:
        resized = opened.convert("RGB").resize((round(opened.width * scale), round(opened.height * scale)))
    path, target = land(tmp_path, f"a.{kind}", resized, kind, quality=90), np.zeros((96, 96, 3), np.uint8)
    decode_image(path, target, 0.875)
    with Image.open(path) as opened:
        whole = opened.convert("RGB")
    side = min(whole.size) * 0.875
    left, top = ((length - side) / 2 for length in whole.size)
    reference = whole.resize((96, 96), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    difference = np.abs(target.astype(int) - np.asarray(reference))
    assert difference.mean() < 2.5 and np.percentile(difference, 99) < 16


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (1, 500), (500, 1), (2, 3), (4, 4), (8, 8)], ids=str)
@pytest.mark.parametrize("crop", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_of_the_smallest_picture_a_pixel_is_left(tmp_path: Path, size: tuple[int, int], crop: float, kind: str) -> None:
    path, target = land(tmp_path, "a", Image.new("RGB", size, (40, 120, 200)), kind), np.zeros((8, 8, 3), np.uint8)
    decode_image(path, target, crop)
    np.testing.assert_allclose(target.astype(int), np.full((8, 8, 3), (40, 120, 200)), atol=3)


@pytest.mark.parametrize(
    ("kind", "decoder"), [("PNG", (ImageFile.ImageFile, "load")), ("JPEG", (simplejpeg, "decode_jpeg"))]
)
def test_no_memory_is_not_the_rows_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, decoder: tuple[Any, str]
) -> None:
    def exhausted(*_: Any, **__: Any) -> Any:
        raise MemoryError

    land(tmp_path, "a.jpg", Image.new("RGB", (20, 20)), kind)
    monkeypatch.setattr(*decoder, exhausted)
    with pytest.raises(MemoryError):
        read(tmp_path)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to(path), "the file cannot be read"),
        (Path.mkdir, "not a regular file"),
        (_pipe, "not a regular file"),  # which nobody writes to: reading it would never end
    ],
)
def test_a_file_that_cannot_be_read_is_a_hole(tmp_path: Path, write_jpeg: Any, make: Any, reason: str) -> None:
    path = write_jpeg(tmp_path / DAY / "a.jpg")
    source = source_of(tmp_path)
    shard = source.partition(DAY).shards[0]
    path.unlink()
    make(path)
    _, failures, _ = numpy_rows(source, shard)
    assert [failure.reason for failure in failures] == [reason]


def test_a_name_that_is_no_text_is_escaped(tmp_path: Path, write_jpeg: Any) -> None:
    write_jpeg(tmp_path / DAY / os.fsdecode(b"caf\xe9.jpg"), RED, RED)
    source = source_of(tmp_path)
    rows, failures, reader = numpy_rows(source, source.partition(DAY).shards[0])
    escaped = [r"caf\udce9.jpg"]
    assert list(reader.origins(0, 1).to_pydict().values()) == [escaped, escaped, [0]]
    assert failures == []
    np.testing.assert_allclose(rows["pixels"][0, 4, 4].astype(int), RED, atol=12)


def test_links_that_lead_nowhere_are_rows_that_cannot_be_read(tmp_path: Path, write_jpeg: Any) -> None:
    write_jpeg(tmp_path / DAY / "d.jpg")
    for name, target in (("a.jpg", "a.jpg"), ("b.jpg", "d.jpg/x"), ("c.jpg", "nothing")):
        (tmp_path / DAY / name).symlink_to(target)
    _, failures = read(tmp_path)
    assert {key: reason for key, (_, reason) in failures.items()} == {
        "a.jpg": "the file cannot be read",
        "b.jpg": "the file cannot be read",
        "c.jpg": "the file vanished",
    }


def test_linked_folders_are_read_once(tmp_path: Path, write_jpeg: Any) -> None:
    write_jpeg(tmp_path / "elsewhere" / "hour" / "a.jpg")
    write_jpeg(tmp_path / DAY / "b.jpg")
    (tmp_path / DAY / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / DAY / "twice").symlink_to(tmp_path / "elsewhere")
    write_jpeg(tmp_path / "2026-01-01" / "c.jpg")
    (tmp_path / DAY / "here").symlink_to(tmp_path / DAY)
    (tmp_path / DAY / "up").symlink_to(tmp_path)
    (shard,) = source_of(tmp_path).partition(DAY).shards
    assert [file.path for file in shard.files] == ["b.jpg", "linked/hour/a.jpg"]


def test_a_linked_folder_that_is_not_there_is_no_empty_one(tmp_path: Path, write_jpeg: Any) -> None:
    write_jpeg(tmp_path / DAY / "b.jpg")
    (tmp_path / DAY / "eu").symlink_to(tmp_path / "not mounted")
    with pytest.raises(DatasetError, match=f"{DAY}/eu: a link of the day leads nowhere"):
        source_of(tmp_path).partition(DAY)


PROGRAM = """
import os, sys
from pathlib import Path
from gpu_runtime.datasets.image_folder import ImageFolderSource
from gpu_runtime.specs import TensorSpec

if not os.getuid():
    os.setuid(65534)  # root may read everything
print(ImageFolderSource(sys.argv[1], (TensorSpec("pixels", "uint8", (8, 8, 3)),)).partition(sys.argv[2]))
"""


@pytest.mark.parametrize("mode", [0o000, 0o444])
@pytest.mark.parametrize("folder", [".", "hour"])
def test_a_folder_that_may_not_be_read_is_no_empty_one(tmp_path: Path, write_jpeg: Any, folder: str, mode: int) -> None:
    write_jpeg(tmp_path / DAY / "a.jpg")
    write_jpeg(tmp_path / DAY / "hour" / "b.jpg")
    for above in [tmp_path, *tmp_path.parents][:3]:
        above.chmod(above.stat().st_mode | 0o555)
    (tmp_path / DAY / folder).chmod(mode)
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), DAY], capture_output=True, text=True)
    (tmp_path / DAY / folder).chmod(0o755)
    assert ended.returncode == 1
    assert "DatasetError: [dataset]" in ended.stderr and "a folder of the day cannot be read" in ended.stderr


def test_a_file_that_vanished_is_a_hole(tmp_path: Path, write_jpeg: Any) -> None:
    path = write_jpeg(tmp_path / DAY / "a.jpg")
    source = source_of(tmp_path)
    shard = source.partition(DAY).shards[0]
    path.unlink()
    _, failures, _ = numpy_rows(source, shard)
    assert [failure.reason for failure in failures] == ["the file vanished"]


def test_another_crop_is_another_partition(tmp_path: Path, write_jpeg: Any) -> None:
    write_jpeg(tmp_path / DAY / "a.jpg")
    digests = [source_of(tmp_path, crop_fraction=crop).partition(DAY).digest for crop in (1.0, 0.9, 1.0)]
    assert digests[0] == digests[2] != digests[1]


def test_rows_are_ordered_by_path_through_folders(tmp_path: Path, write_jpeg: Any) -> None:
    for name in ("c.jpg", "a.JPG", "b/z.jpeg", "b/a.png"):
        write_jpeg(tmp_path / DAY / name)
    source = source_of(tmp_path, files_per_shard=3)
    shards = source.partition(DAY).shards
    assert [[file.path for file in shard.files] for shard in shards] == [["a.JPG", "b/a.png", "b/z.jpeg"], ["c.jpg"]]
    assert list(source.open(shards[1]).origins(0, 1).to_pydict().values()) == [["c.jpg"], ["c.jpg"], [0]]
    both = ["b/a.png", "b/z.jpeg"]
    assert list(source.open(shards[0]).origins(1, 3).to_pydict().values()) == [both, both, [0, 0]]


def test_hidden_files_other_files_and_folders_are_no_rows(tmp_path: Path, write_jpeg: Any) -> None:
    write_jpeg(tmp_path / DAY / "a.jpg")
    write_jpeg(tmp_path / DAY / ".half-copied.jpg")
    (tmp_path / DAY / "notes.txt").write_text("not a picture")
    (tmp_path / DAY / "album.jpg").mkdir()
    assert [file.path for file in source_of(tmp_path).partition(DAY).shards[0].files] == ["a.jpg"]


def test_an_empty_folder_is_an_empty_day_and_no_folder_an_error(tmp_path: Path) -> None:
    (tmp_path / DAY).mkdir()
    assert source_of(tmp_path).partition(DAY).shards == ()
    with pytest.raises(DatasetError, match="no folder"):
        source_of(tmp_path).partition("2026-03-02")


@pytest.mark.parametrize(
    "inputs",
    [
        (TensorSpec("pixels", "float32", (8, 8, 3)),),
        (TensorSpec("pixels", "uint8", (3, 8, 8)),),
        (PIXELS, TensorSpec("other", "uint8", (8, 8, 3))),
    ],
    ids=["float", "channels first", "two inputs"],
)
def test_images_fill_one_uint8_input(tmp_path: Path, inputs: Any) -> None:
    with pytest.raises(SpecError):
        ImageFolderSource(str(tmp_path), inputs)


def test_a_library_that_is_missing_is_named_before_a_picture_is_blamed(
    tmp_path: Path, write_jpeg: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jpeg(tmp_path / DAY / "a.jpg")
    source = source_of(tmp_path)
    (shard,) = source.partition(DAY).shards
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(SpecError, match=r"simplejpeg: a library that decodes pictures is missing.*\[images\]"):
        source.open(shard)
