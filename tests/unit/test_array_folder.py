"""Days of `.npy` files: a file that is not wholly what was declared is an error that names it; no file is changed."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gpu_runtime.backends.engine_set import build_engines
from gpu_runtime.datasets.array_folder import ArrayFolderSource, ArrayReader
from gpu_runtime.datasets.declaration import DatasetSpec
from gpu_runtime.datasets.partition import check_unchanged, numpy_rows
from gpu_runtime.device.host import HostDevice, cpu_class
from gpu_runtime.errors import DatasetError, SpecError
from gpu_runtime.predictions.delta_table import PredictionTable
from gpu_runtime.predictions.shard_file import PredictionSchema
from gpu_runtime.scoring import Scorer, ScoringPolicy, score_partition
from gpu_runtime.specs import ModelSpec, OnnxSource, TensorSpec

DAY = "2026-03-01"
X = TensorSpec("x", "float32", (3,))
SECRET = 424242.5


def values_of(rows: int, first: int = 0) -> Any:
    """`[rows, 3]`, all different."""
    return np.arange(3 * first, 3 * (first + rows), dtype=np.float32).reshape(rows, 3)


def encoded(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def headed(header: str, data: bytes = b"") -> bytes:
    """A file with this header, as it stands."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def land(root: Path, content: Any, file: str = "part-0.npy") -> Path:
    path = root / DAY / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else encoded(content))
    return path


def source_of(root: Path, spec: TensorSpec = X, **settings: Any) -> ArrayFolderSource:
    return ArrayFolderSource(str(root), (spec,), **settings)


def opened(root: Path, spec: TensorSpec = X) -> ArrayReader:
    source = source_of(root, spec)
    return source.open(source.partition(DAY).shards[0])


def refusal(root: Path, spec: TensorSpec = X) -> DatasetError:
    """What cutting the day ends with; it names the file and what to do, and no value."""
    with pytest.raises(DatasetError) as caught:
        source_of(root, spec).partition(DAY)
    error = caught.value
    assert (error.stage, error.item) == ("dataset", f"{DAY}/part-0.npy")
    assert error.next_step == "land the file again, as declared"
    assert "4242" not in str(error)
    return error


# Good days


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int8", "int32", "int64", "bool"])
def test_the_first_axis_are_the_rows(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 2, (5, *shape)).astype(dtype)
    land(tmp_path, values)
    source = source_of(tmp_path, TensorSpec("v", dtype, shape))
    (shard,) = source.partition(DAY).shards
    rows, failures, reader = numpy_rows(source, shard)
    np.testing.assert_array_equal(rows["v"], values)
    assert (rows["v"].dtype, failures, reader.rows, reader.labels()) == (values.dtype, [], 5, None)


def test_files_in_order_of_their_names_are_cut_into_shards(tmp_path: Path) -> None:
    land(tmp_path, values_of(7, first=25), "b/part.npy")
    land(tmp_path, values_of(25), "a.NPY")
    source = source_of(tmp_path, rows_per_shard=10)
    shards = source.partition(DAY).shards
    assert [(s.index, s.files[0].path, s.span, s.rows) for s in shards] == [
        (0, "a.NPY", (0, 10), 10),
        (1, "a.NPY", (10, 20), 10),
        (2, "a.NPY", (20, 25), 5),
        (3, "b/part.npy", (0, 7), 7),
    ]
    read = [numpy_rows(source, shard)[0]["x"] for shard in shards]
    np.testing.assert_array_equal(np.concatenate(read), values_of(32))
    assert [(shard.span, shard.rows) for shard in source_of(tmp_path).partition(DAY).shards] == [(None, 32)]


def test_a_row_is_named_by_its_file_and_its_position_in_it(tmp_path: Path) -> None:
    land(tmp_path, values_of(25), "deep/part.npy")
    source = source_of(tmp_path, rows_per_shard=10)
    reader = source.open(source.partition(DAY).shards[1])
    assert reader.origins(8, 10).to_pylist() == [
        {"row_key": f"deep/part.npy#{i}", "source_file": "deep/part.npy", "source_position": i} for i in (18, 19)
    ]


def test_a_name_that_is_no_text_is_spelled_out(tmp_path: Path) -> None:
    land(tmp_path, values_of(1), os.fsdecode(b"caf\xe9.npy"))
    assert opened(tmp_path).origins(0, 1)["row_key"].to_pylist() == [r"caf\udce9.npy#0"]
    land(tmp_path, b"", os.fsdecode(b"caf\xe9.npy"))
    with pytest.raises(DatasetError) as caught:
        source_of(tmp_path).partition(DAY)
    assert caught.value.item == rf"{DAY}/caf\udce9.npy"


def test_part_of_a_shard_is_copied_or_shown_as_it_lies(tmp_path: Path) -> None:
    land(tmp_path, values_of(20))
    source = source_of(tmp_path, rows_per_shard=10)
    reader = source.open(source.partition(DAY).shards[1])
    staging = {"x": np.zeros((3, 3), np.float32)}
    assert [piece() for piece in reader.pieces(4, 7, staging)] == [[]] and reader.pieces(4, 4, {}) == []
    np.testing.assert_array_equal(staging["x"], values_of(3, first=14))
    seen, all_of_it = reader.view(4, 7), reader.view(0, 10)
    assert seen is not None and all_of_it is not None
    np.testing.assert_array_equal(seen["x"], values_of(3, first=14))
    assert np.shares_memory(seen["x"], all_of_it["x"]) and seen["x"].flags.c_contiguous


def test_numbers_that_no_engine_may_read_where_they_lie_are_copied(tmp_path: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3), }"
    land(tmp_path, headed(header + " " * (len(header) % 2) + "\n", values_of(4).tobytes()))
    source = source_of(tmp_path)
    (shard,) = source.partition(DAY).shards
    rows, _, reader = numpy_rows(source, shard)
    assert reader.view(0, 4) is None
    np.testing.assert_array_equal(rows["x"], values_of(4))


def test_an_engine_that_writes_to_its_input_does_not_change_the_file(tmp_path: Path) -> None:
    path = land(tmp_path, values_of(4))
    before = path.read_bytes()
    reader = opened(tmp_path)
    seen = reader.view(0, 4)
    assert seen is not None
    seen["x"][:] = -1
    del seen, reader
    assert path.read_bytes() == before
    again = opened(tmp_path).view(0, 4)
    assert again is not None
    np.testing.assert_array_equal(again["x"], values_of(4))


def test_a_file_without_rows_is_no_shard(tmp_path: Path) -> None:
    land(tmp_path, values_of(0), "a.npy")
    land(tmp_path, values_of(2), "b.npy")
    assert [shard.files[0].path for shard in source_of(tmp_path).partition(DAY).shards] == ["b.npy"]
    land(tmp_path, np.zeros(0, np.float32), "b.npy")
    with pytest.raises(DatasetError, match="another array"):
        source_of(tmp_path).partition(DAY)


def test_the_day_is_known_by_its_files_and_what_is_read_of_them(tmp_path: Path) -> None:
    path = land(tmp_path, values_of(4))
    before = source_of(tmp_path).partition(DAY)
    assert (before.files, before.nbytes) == (1, path.stat().st_size)
    assert source_of(tmp_path).partition(DAY).digest == before.digest
    assert source_of(tmp_path, replace(X, minimum=0.0)).partition(DAY).digest != before.digest
    land(tmp_path, values_of(5))
    assert source_of(tmp_path).partition(DAY).digest != before.digest


def test_what_is_hidden_is_left_out_and_another_format_is_no_empty_day(tmp_path: Path) -> None:
    land(tmp_path, values_of(5), ".staging/a.npy")
    land(tmp_path, values_of(5), "_temporary/a.npy")
    assert source_of(tmp_path).partition(DAY).shards == ()
    land(tmp_path, b"a\n1\n", "rows.csv")
    with pytest.raises(DatasetError, match=r"has files, and none that is read.*the first rows\.csv"):
        source_of(tmp_path).partition(DAY)
    with pytest.raises(DatasetError, match="a day without rows is an empty folder"):
        source_of(tmp_path).partition("2026-03-02")


def test_the_format_is_declared_by_its_name(tmp_path: Path) -> None:
    model = ModelSpec("m", "1", OnnxSource("m.onnx"), (X,), ("y",))
    source = DatasetSpec("vectors", "arrays").source(tmp_path, model)
    assert source == ArrayFolderSource(str(tmp_path / "vectors"), (X,))
    assert DatasetSpec("vectors", "arrays", rows_per_shard=7).source(tmp_path, model) == replace(
        source, rows_per_shard=7
    )


def test_arrays_fill_one_input(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"x, y.*one input.*2 inputs"):
        ArrayFolderSource(str(tmp_path), (X, TensorSpec("y", "float32")))


# Many small files


def test_small_files_share_a_shard_and_each_row_keeps_its_place(tmp_path: Path) -> None:
    for i in range(5):
        land(tmp_path, values_of(4, first=4 * i), f"{i}.npy")
    land(tmp_path, values_of(25), "3.npy")
    source = source_of(tmp_path, rows_per_shard=10)
    shards = source.partition(DAY).shards
    assert [("".join(f.path[0] for f in s.files), s.rows, s.span) for s in shards] == [
        ("01", 8, None),
        ("2", 4, (0, 4)),
        ("3", 10, (0, 10)),
        ("3", 10, (10, 20)),
        ("3", 5, (20, 25)),
        ("4", 4, (0, 4)),
    ]
    rows, failures, reader = numpy_rows(source, shards[0])
    np.testing.assert_array_equal(rows["x"], values_of(8))
    seen = reader.view(2, 7)
    assert seen is not None and failures == []
    np.testing.assert_array_equal(seen["x"], values_of(5, first=2))
    places = [("0.npy", 2), ("0.npy", 3), ("1.npy", 0), ("1.npy", 1), ("1.npy", 2)]
    assert reader.origins(2, 7).to_pylist() == [
        {"row_key": f"{file}#{row}", "source_file": file, "source_position": row} for file, row in places
    ]
    assert len(source_of(tmp_path).partition(DAY).shards) == 1
    assert len(source_of(tmp_path, files_per_shard=2).partition(DAY).shards) == 3


def test_files_of_many_bytes_do_not_share_a_shard(tmp_path: Path) -> None:
    """They stay mapped: together they would be copied."""
    wide = TensorSpec("x", "uint8", (1 << 20,))
    for i in range(3):
        land(tmp_path, np.zeros((6, 1 << 20), np.uint8), f"{i}.npy")
    assert [shard.rows for shard in source_of(tmp_path, wide).partition(DAY).shards] == [12, 6]


def test_a_bad_file_among_small_ones_is_named(tmp_path: Path) -> None:
    paths = [land(tmp_path, values_of(2), f"{i}.npy") for i in range(5)]
    source = source_of(tmp_path)
    (shard,) = source.partition(DAY).shards
    os.truncate(paths[3], 100)
    with pytest.raises(DatasetError) as caught:
        source.open(shard)
    assert caught.value.item == f"{DAY}/3.npy"
    with pytest.raises(DatasetError) as caught:
        source.partition(DAY)
    assert caught.value.item == f"{DAY}/3.npy"


# Bad files


@pytest.mark.parametrize(
    ("values", "got"),
    [
        (np.full((4, 3), SECRET), "float64 [4, 3]"),
        (np.full((4, 3), 4242, np.int32), "int32 [4, 3]"),
        (np.full((4, 3), SECRET, ">f4"), ">f4 [4, 3]"),
        (np.full((4, 2), SECRET, np.float32), "float32 [4, 2]"),
        (np.full((4, 3, 1), SECRET, np.float32), "float32 [4, 3, 1]"),
        (np.full(12, SECRET, np.float32), "float32 [12]"),
        (np.asarray(SECRET, np.float32), "float32 []"),
        (np.full((4, 3), "4242"), "<U4 [4, 3]"),
        (np.full((4, 3), 4242, "M8[s]"), "datetime64[s] [4, 3]"),
        (np.full((4, 3), SECRET, [("a", "<f4")]), "[('a', '<f4')] [4, 3]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_array_than_declared_is_an_error(tmp_path: Path, values: Any, got: str) -> None:
    land(tmp_path, values)
    error = refusal(tmp_path)
    assert (error.what, error.expected) == ("the file holds another array", "an array float32 [rows, 3]")
    assert error.got == got


def test_one_number_is_no_file_of_scalar_rows(tmp_path: Path) -> None:
    scalar = TensorSpec("x", "float32")
    land(tmp_path, np.asarray(SECRET, np.float32))
    error = refusal(tmp_path, scalar)
    assert (error.expected, error.got) == ("an array float32 [rows]", "float32 []")
    land(tmp_path, np.full((4, 1), SECRET, np.float32))
    assert refusal(tmp_path, scalar).got == "float32 [4, 1]"


def test_fortran_order_is_an_error(tmp_path: Path) -> None:
    land(tmp_path, np.asfortranarray(values_of(4)))
    error = refusal(tmp_path)
    assert (error.what, error.expected, error.got) == (
        "the file's rows do not lie one behind the other",
        "C order",
        "Fortran order",
    )


WHOLE = encoded(np.full((4, 3), SECRET, np.float32))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        WHOLE[:5],
        WHOLE[:60],
        WHOLE[:128],
        WHOLE[:-1],
        b"<html>4242</html>" * 9,
        b"\x93NUMPY\x09\x00" + WHOLE[8:],
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3), '4242': 0}\n", bytes(48)),
        headed("{'descr': '4242', 'fortran_order': False, 'shape': (4, 3)}\n", bytes(48)),
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 3)}\n", bytes(48)),
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (-4, -3)}\n", bytes(48)),
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 3)}\n", bytes(48)),
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (1" + "0" * 99 + ", 3)}\n", bytes(48)),
        headed("__import__('os').abort()\n", bytes(48)),
        headed("(" * 9_000 + "\n", bytes(48)),
        headed(" " * 60_000 + "{}\n", bytes(48)),
    ],
    ids=[
        "empty", "five bytes", "half a header", "no row", "a byte short", "page", "another version", "another key",
        "no dtype", "rows below 0", "a shape below 0", "endless", "more than endless", "a program", "deep", "long",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_a_file_that_is_no_whole_array_is_an_error(tmp_path: Path, content: bytes) -> None:
    land(tmp_path, content)
    error = refusal(tmp_path)
    assert (error.what, error.expected) == ("not a readable .npy file", "an array float32 [rows, 3]")
    assert error.got is not None and error.got.endswith(("Error", "Exception"))


@pytest.mark.parametrize(
    "content",
    [
        WHOLE + b"\0",
        WHOLE + WHOLE,
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 3), }     \n", WHOLE[128:]),
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 3), }     \n", WHOLE[128:]),
    ],
    ids=["a byte more", "two arrays", "a row uncounted", "no row counted"],
)
def test_a_file_that_holds_more_than_its_array_is_an_error(tmp_path: Path, content: bytes) -> None:
    """Its rows would be lost in silence."""
    land(tmp_path, content)
    error = refusal(tmp_path)
    assert error.what == "the file does not end where its array ends"
    assert error.got == f"{len(content)} bytes" and error.expected != error.got


class Loaded:
    loads = 0

    def __reduce__(self) -> Any:
        return (Loaded._load, ())

    @staticmethod
    def _load() -> Loaded:
        Loaded.loads += 1
        return Loaded()


def test_an_array_of_objects_is_an_error_and_is_not_loaded(tmp_path: Path) -> None:
    land(tmp_path, np.asarray([[Loaded()] * 3] * 4, object))
    assert refusal(tmp_path).what == "not a readable .npy file"
    land(tmp_path, pickle.dumps(Loaded()))
    assert refusal(tmp_path).what == "not a readable .npy file"
    assert Loaded.loads == 0


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_file_is_an_error_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    (tmp_path / DAY).mkdir()
    path = tmp_path / DAY / "part-0.npy"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("gone")
    error = refusal(tmp_path)
    got = "OSError" if kind == "pipe" else "FileNotFoundError"
    assert (error.what, error.got) == ("not a readable .npy file", got)


def test_a_file_that_vanished_or_became_another_array_is_an_error_when_it_is_opened(tmp_path: Path) -> None:
    path = land(tmp_path, values_of(4))
    source = source_of(tmp_path)
    (shard,) = source.partition(DAY).shards
    land(tmp_path, values_of(4).astype(np.float64))
    with pytest.raises(DatasetError, match=rf"{DAY}/part-0\.npy: the file holds another array") as caught:
        source.open(shard)
    assert caught.value.got == "float64 [4, 3]"
    path.unlink()
    with pytest.raises(DatasetError, match="not a readable"):
        source.open(shard)


@pytest.mark.parametrize("nbytes", [0, 100, 128, 128 + 47])
def test_a_file_that_got_shorter_is_an_error_and_not_the_end_of_the_process(tmp_path: Path, nbytes: int) -> None:
    path = land(tmp_path, np.full((4, 3), SECRET, np.float32))
    reader = opened(tmp_path)
    os.truncate(path, nbytes)
    (piece,) = reader.pieces(0, 4, {"x": np.zeros((4, 3), np.float32)})
    for read in (piece, lambda: reader.view(0, 4)):
        with pytest.raises(DatasetError) as caught:
            read()
        error = caught.value
        assert (error.what, error.item) == ("the file got shorter while it was read", f"{DAY}/part-0.npy")
        assert (error.expected, error.got) == ("176 bytes", f"{nbytes} bytes")
        assert "4242" not in str(error)


def test_a_file_that_grew_gives_the_rows_it_had_and_no_finished_shard(tmp_path: Path) -> None:
    path = land(tmp_path, values_of(4))
    source = source_of(tmp_path)
    (shard,) = source.partition(DAY).shards
    reader = source.open(shard)
    with path.open("ab") as more:
        more.write(values_of(1).tobytes())
    seen = reader.view(0, 4)
    assert seen is not None
    np.testing.assert_array_equal(seen["x"], values_of(4))
    with pytest.raises(DatasetError, match="changed while"):
        check_unchanged(shard)


@pytest.mark.parametrize("then", ["nothing", "a shorter file"])
def test_a_file_whose_name_was_taken_away_is_read_to_its_end(tmp_path: Path, then: str) -> None:
    """What was opened is still whole; that the day changed is told when the shard is finished."""
    path = land(tmp_path, values_of(4))
    source = source_of(tmp_path)
    (shard,) = source.partition(DAY).shards
    reader = source.open(shard)
    path.unlink()
    if then == "a shorter file":
        land(tmp_path, values_of(1))
    seen = reader.view(0, 4)
    assert seen is not None
    np.testing.assert_array_equal(seen["x"], values_of(4))
    with pytest.raises(DatasetError, match="changed while"):
        check_unchanged(shard)


# Scored by real engines

WIDE = TensorSpec("x", "float32", (7,), -100.0, 100.0)
BYTES = TensorSpec("x", "uint8", (5,))


@pytest.fixture(scope="module", params=[WIDE, BYTES], ids=["float32", "uint8"])
def layer(request: Any, serve: Any, make_graph: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`relu(x @ w + b)`, its weights, and an engine of each library that runs here; a row is 28 or 5 bytes long."""
    spec, rng = request.param, np.random.default_rng(1)
    w, b = rng.standard_normal((*spec.shape, 3)).astype(np.float32), np.asarray([0.5, -0.5, 0.0], np.float32)
    path = make_graph(
        tmp_path_factory.mktemp("layer") / "layer.onnx",
        [
            helper.make_node("Cast", ["x"], ["numbers"], to=TensorProto.FLOAT),
            helper.make_node("Gemm", ["numbers", "w", "b"], ["sum"]),
            helper.make_node("Relu", ["sum"], ["y"]),
        ],
        {"w": w, "b": b},
        [spec],
        [TensorSpec("y", "float32", (3,))],
    )
    name = f"layer_{spec.dtype}"
    made = serve(ModelSpec(name, "1", OnnxSource(str(path)), (spec,), ("y",), max_batch=8))
    built = build_engines(name, [made.exported.graph()], ["onnxruntime", "openvino"], cpu_class(), made.store)
    return SimpleNamespace(spec=spec, w=w, b=b, plan=made.plan, store=made.store, built=built)


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with HostDevice() as opened:
        yield opened


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("library", ["onnxruntime", "openvino"])
def test_a_day_is_scored_from_where_it_lies_in_its_files(
    layer: Any, device: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, streams: int
) -> None:
    starts, copied = list[int](), list[int]()
    view, pieces = ArrayReader.view, ArrayReader.pieces

    def watched_view(self: ArrayReader, start: int, stop: int) -> Any:
        found = view(self, start, stop)
        assert found is not None
        starts.append(found["x"].ctypes.data)
        return found

    def watched_pieces(self: ArrayReader, start: int, stop: int, staging: Any) -> Any:
        copied.append(stop - start)
        return pieces(self, start, stop, staging)

    monkeypatch.setattr(ArrayReader, "view", watched_view)
    monkeypatch.setattr(ArrayReader, "pieces", watched_pieces)
    values = np.random.default_rng(2).uniform(0, 99, (90, *layer.spec.shape)).astype(layer.spec.numpy_dtype)
    bad = [13, 40] if layer.spec.dtype == "float32" else []
    if bad:
        values[13, 2], values[40, 6] = np.nan, 1e9
    paths = [land(tmp_path / "days", values[:53], "a.npy"), land(tmp_path / "days", values[53:], "b.npy")]
    before = [hashlib.sha256(path.read_bytes()).digest() for path in paths]

    source = source_of(tmp_path / "days", layer.spec, rows_per_shard=23)
    engine = layer.built.engines[f"{library}:fp32"]
    plan = replace(
        layer.plan, engine=engine.key, engine_set=layer.built.digest, engine_digest=engine.digest, streams=streams
    )
    schema, table = PredictionSchema(plan.engine_file(layer.store).outputs, {}), PredictionTable(tmp_path / "table")
    with Scorer(plan, layer.store, device, ScoringPolicy(1.0)) as scorer:
        made = score_partition(scorer, source.partition(DAY), source, schema, table, "run")

    assert made.accounted and (made.published, made.published_quarantined) == (90 - len(bad), len(bad))
    frame = table.read_day(DAY).sort_values(["source_file", "source_position"])
    good = [row for row in range(90) if row not in bad]
    keys = [f"a.npy#{row}" if row < 53 else f"b.npy#{row - 53}" for row in good]
    assert frame["row_key"].tolist() == keys
    with np.errstate(invalid="ignore"):
        expected = np.maximum(values.astype(np.float32) @ layer.w + layer.b, 0)[good]
    np.testing.assert_allclose(np.stack(frame["y"].to_list()), expected, rtol=1e-5, atol=1e-4)
    lost = table.read_quarantine(DAY).sort_values("source_position")
    assert lost["row_key"].tolist() == [f"a.npy#{row}" for row in bad]
    assert [hashlib.sha256(path.read_bytes()).digest() for path in paths] == before
    # Shards of 23, 23, 7, 23 and 14 rows in batches of 4: only what is left over is copied.
    assert (len(starts), copied) == (5 + 5 + 1 + 5 + 3, [3, 3, 3, 3, 2])
    assert any(start % 64 for start in starts) and any(start % 16 for start in starts)
