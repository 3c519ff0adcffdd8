"""Image days: whatever is not a whole picture is a hole with a reason; the rest is upright RGB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpu_runtime.datasets import decode
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
    return rows["pixels"], {reader.origin(f.row).key: (f.stage, f.reason) for f in failures}


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


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_unknown_range_are_not_guessed_at(tmp_path: Path, mode: str) -> None:
    (tmp_path / DAY).mkdir()
    Image.new(mode, (16, 16), 1).save(tmp_path / DAY / "a.png", "TIFF")
    assert "32 bits" in read(tmp_path)[1]["a.png"][1]


def test_a_picture_taken_sideways_is_turned_upright(tmp_path: Path, write_jpeg: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down: left and right change places
    write_jpeg(tmp_path / DAY / "a.jpg", RED, BLUE, exif=exif)
    pixels, _ = read(tmp_path)
    left, right = halves(pixels[0])
    np.testing.assert_allclose(left, BLUE, atol=12)
    np.testing.assert_allclose(right, RED, atol=12)


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


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "the file is empty"), (b"<html>not found</html>", "not a whole picture")]
)
def test_what_is_no_picture_is_a_hole(tmp_path: Path, write_jpeg: Any, content: bytes, reason: str) -> None:
    write_jpeg(tmp_path / DAY / "a.jpg", RED, RED)
    (tmp_path / DAY / "b.jpg").write_bytes(content)
    write_jpeg(tmp_path / DAY / "c.jpg", BLUE, BLUE)
    pixels, failures = read(tmp_path)
    assert failures == {"b.jpg": ("decode", reason)}
    np.testing.assert_allclose(pixels[:, 4, 4].astype(int), [RED, (0, 0, 0), BLUE], atol=12)


def test_a_picture_of_too_many_pixels_is_refused_unopened(
    tmp_path: Path, write_jpeg: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jpeg(tmp_path / DAY / "small.jpg", size=16)
    write_jpeg(tmp_path / DAY / "bomb.jpg", size=64)
    monkeypatch.setattr(decode, "MAX_PIXELS", 1000)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    assert read(tmp_path)[1] == {"bomb.jpg": ("decode", "more than 1000 pixels")}


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
    origin = source.open(shards[1]).origin(0)
    assert (origin.key, origin.file, origin.position) == ("c.jpg", "c.jpg", 0)
    keys, files, positions = source.open(shards[0]).origins(1, 3)
    assert (list(keys), list(files), list(positions)) == (["b/a.png", "b/z.jpeg"], ["b/a.png", "b/z.jpeg"], [0, 0])


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
