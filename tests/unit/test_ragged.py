"""Text and lists as rows that differ in length: each with its own values, and a reason where it has none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpu_runtime.datasets import parquet
from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.datasets.partition import numpy_rows, read_rows, reading_of
from gpu_runtime.datasets.ragged import tokens_of
from gpu_runtime.datasets.sample import sample_rows
from gpu_runtime.errors import DatasetError, SpecError
from gpu_runtime.specs import TensorSpec

DAY = "2026-03-01"
IDS = TensorSpec("ids", "int32", (-1,), minimum=1, maximum=99)
MASK = TensorSpec("mask", "bool", (-1,), mask=True)
VALUES = TensorSpec("values", "float32", (-1,), minimum=-1.0, maximum=1.0)
WORDS = {"[UNK]": 1, "a": 2, "b": 3, "c": 4, "late": 5}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Words by white space; the file pads and truncates at 2, which is not what a row is."""
    path = tmp_path / "tokenizer.json"
    ends = {"strategy": {"Fixed": 2}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]"}
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    plain = {
        "version": "1.0",
        "truncation": cut,
        "padding": {**ends, "pad_to_multiple_of": None},
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"},
    }
    path.write_text(json.dumps(plain))
    return str(path)


def source_of(root: Path, columns: dict[str, Any], spec: TensorSpec = IDS, **settings: Any) -> ParquetSource:
    folder = root / "days" / DAY
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "part.parquet", row_group_size=5)
    given = {"columns": {spec.name: ("text",)}, "max_length": 6} | settings
    return ParquetSource(str(root / "days"), (spec, MASK), **given)


def rows_of(source: ParquetSource) -> tuple[list[list[float] | str], Any]:
    """Each row in the order of the file: its values, or why it has none."""
    (shard,) = source.partition(DAY).shards
    inputs, failures, reader = numpy_rows(source, shard)
    assert reader.order is not None and reader.lengths is not None
    assert (np.diff(reader.lengths) <= 0).all()
    values, mask = inputs[source.inputs[0].name], inputs["mask"]
    assert (mask.sum(axis=1) == reader.lengths).all()
    assert (values[~mask] == source.inputs[0].filler).all()
    found: list[Any] = [None] * reader.rows
    for row, place in enumerate(reader.order):
        found[place] = values[row, : reader.lengths[row]].tolist()
    for failure in failures:
        assert failure.stage == "input"
        found[reader.order[failure.row]] = failure.reason
    return found, reader


def test_a_text_becomes_its_ids_whatever_padding_the_tokenizers_file_asks_for(tmp_path: Path, tokenizer: str) -> None:
    texts = ["a b c", "late", "b b b b b b", "what", "c a"]
    found, reader = rows_of(source_of(tmp_path, {"text": texts}, tokenizer=tokenizer))
    assert found == [[2, 3, 4], [5], [3] * 6, [1], [4, 2]]
    assert reader.lengths.tolist() == [6, 3, 2, 1, 1] and reader.order.tolist() == [2, 0, 4, 1, 3]


def test_origins_and_labels_go_with_their_rows(tmp_path: Path, tokenizer: str) -> None:
    columns = {"text": ["a", "a b c", "a b"], "id": ["x", "y", "z"], "stars": [1.0, 2.0, 3.0]}
    _, reader = rows_of(source_of(tmp_path, columns, tokenizer=tokenizer, row_key="id", label="stars"))
    assert reader.origins(0, 2).to_pylist() == [
        {"row_key": "y", "source_file": "part.parquet", "source_position": 1},
        {"row_key": "z", "source_file": "part.parquet", "source_position": 2},
    ]
    assert reader.labels().tolist() == [2.0, 3.0, 1.0]


def test_a_text_without_an_id_or_with_too_many_has_a_reason_that_does_not_quote_it(
    tmp_path: Path, tokenizer: str
) -> None:
    texts = pa.array(["a", None, "", "c c c c c c c", "b"])
    found, _ = rows_of(source_of(tmp_path, {"text": texts}, tokenizer=tokenizer))
    assert found == [
        [2],
        "column 'text' is null or no UTF-8",
        "column 'text' holds no token",
        "column 'text' holds more than 6 tokens",
        [3],
    ]
    cut, _ = rows_of(source_of(tmp_path, {"text": texts}, tokenizer=tokenizer, truncate=True))
    assert cut[3] == [4] * 6


def test_a_text_is_cut_at_the_side_that_the_tokenizer_names(tmp_path: Path, tokenizer: str) -> None:
    settings = json.loads(Path(tokenizer).read_text())
    settings["truncation"]["direction"] = "Left"
    Path(tokenizer).write_text(json.dumps(settings))
    cut, _ = rows_of(source_of(tmp_path, {"text": ["a b c a b c late"]}, tokenizer=tokenizer, truncate=True))
    assert cut == [[3, 4, 2, 3, 4, 5]]


def test_a_longest_row_without_room_for_text_is_refused(tmp_path: Path, tokenizer: str) -> None:
    settings = json.loads(Path(tokenizer).read_text())
    ends = [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"a": {"id": "a", "ids": [2], "tokens": ["a"]}}
    settings["post_processor"] = {"type": "TemplateProcessing", "single": ends, "pair": ends, "special_tokens": special}
    Path(tokenizer).write_text(json.dumps(settings))
    for truncate in (True, False):
        source = source_of(tmp_path, {"text": ["b"]}, tokenizer=tokenizer, truncate=truncate, max_length=1)
        with pytest.raises(DatasetError, match=r"leaves no room for text.*more than its 1 special tokens"):
            rows_of(source)


@pytest.mark.parametrize("read", ["open", "parts"])
def test_a_tokenizer_replaced_after_the_day_was_cut_scores_nothing(tmp_path: Path, tokenizer: str, read: str) -> None:
    source = source_of(tmp_path, {"text": ["a"]}, tokenizer=tokenizer)
    (shard,) = source.partition(DAY).shards
    Path(tokenizer).write_text(Path(tokenizer).read_text().replace('"late"', '"soon"'))
    with pytest.raises(DatasetError, match="the tokenizer changed while the day was being scored"):
        list(getattr(source, read)(shard))


@pytest.mark.parametrize("bounded", ["_RAGGED_ROWS_AT_ONCE", "nbytes_per_shard"])
def test_one_large_row_group_is_read_in_parts_and_each_row_keeps_its_place(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, bounded: str
) -> None:
    texts = [" ".join("abc"[(row + i) % 3] for i in range(1 + row % 6)) for row in range(100)]
    source = source_of(tmp_path, {"text": texts, "stars": range(100)}, tokenizer=tokenizer, label="stars")
    path = tmp_path / "days" / DAY / "part.parquet"
    pq.write_table(pq.read_table(path, partitioning=None), path, use_dictionary=False)
    if bounded == "nbytes_per_shard":
        source = replace(source, nbytes_per_shard=100, rows_per_shard=1_000)
    else:
        monkeypatch.setattr(parquet, bounded, 30)
    (shard,) = source.partition(DAY).shards
    found: dict[int, list[int]] = {}
    sizes = []
    for part in source.parts(shard):
        sizes.append(part.rows)
        inputs, failures = read_rows(source.inputs, part, 0, part.rows)
        positions = part.origins(0, part.rows).column("source_position").to_pylist()
        labels = part.labels()
        assert not failures and part.order is not None and positions == part.order.tolist() == labels.tolist()
        assert part.lengths is not None and (np.diff(part.lengths) <= 0).all()
        found |= {place: inputs["ids"][row][inputs["mask"][row]].tolist() for row, place in enumerate(positions)}
    assert max(sizes) <= 30 and sum(sizes) == 100
    assert found == {row: [WORDS[word] for word in text.split()] for row, text in enumerate(texts)}


def test_text_that_is_no_utf8_costs_its_row_alone(tmp_path: Path, tokenizer: str) -> None:
    damaged = pa.array([b"a b", b"\xff\xfe", b"c"], pa.binary()).view(pa.string())
    found, _ = rows_of(source_of(tmp_path, {"text": damaged}, tokenizer=tokenizer))
    assert found == [[2, 3], "column 'text' is null or no UTF-8", [4]]


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.float16())])
def test_a_list_becomes_its_numbers(tmp_path: Path, kind: pa.DataType) -> None:
    lists = pa.array([[0.5], [1.0, -1.0, 0.25], [0.0, 0.5]], kind)
    found, _ = rows_of(source_of(tmp_path, {"text": lists}, VALUES))
    assert found == [[0.5], [1.0, -1.0, 0.25], [0.0, 0.5]]


def test_lists_that_are_all_of_one_length_are_rows_too(tmp_path: Path) -> None:
    found, _ = rows_of(source_of(tmp_path, {"text": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))}))
    assert found == [[1, 2], [3, 4]]


def test_a_list_that_cannot_be_scored_costs_its_row_alone(tmp_path: Path) -> None:
    lists: Sequence[Any] = [
        [0.5], None, [], [0.1] * 7, [0.5, None], [0.5, float("nan")], [0.5, 1.5], [float("inf")], [0.25, 0.75],
    ]  # fmt: skip
    found, _ = rows_of(
        source_of(tmp_path, {"text": pa.array(lists, pa.list_(pa.float64()))}, VALUES, rows_per_shard=99)
    )
    outside = "column 'text' is outside its declared range or type"
    assert found == [
        [0.5],
        "column 'text' is null",
        "column 'text' is empty",
        "column 'text' holds more than 6 values",
        "column 'text' holds a null",
        outside,
        outside,
        outside,
        [0.25, 0.75],
    ]


@pytest.mark.parametrize("bad", [0, 100, 2**40, -(2**40)])
def test_an_id_outside_the_vocabulary_never_gets_in(tmp_path: Path, bad: int) -> None:
    lists = pa.array([[1, 2], [3, bad, 4], [99]], pa.list_(pa.int64()))
    found, _ = rows_of(source_of(tmp_path, {"text": lists}))
    assert found == [[1, 2], "column 'text' is outside its declared range or type", [99]]


def test_a_number_too_large_for_its_dtype_is_outside(tmp_path: Path) -> None:
    spec = replace(VALUES, minimum=None, maximum=None)
    lists = pa.array([[1e39, 1.0], [2.0]], pa.list_(pa.float64()))
    found, _ = rows_of(source_of(tmp_path, {"text": lists}, spec))
    assert found == ["column 'text' is outside its declared range or type", [2.0]]


@pytest.mark.parametrize(
    ("column", "tokens", "expected"),
    [([1.0], False, "a list of numbers"), ([["a"]], False, "a list of numbers"), ([1.0], True, "text")],
)
def test_a_column_of_another_kind_is_an_error(
    tmp_path: Path, tokenizer: str, column: Any, tokens: bool, expected: str
) -> None:
    source = source_of(tmp_path, {"text": column}, tokenizer=tokenizer if tokens else None)
    with pytest.raises(DatasetError, match="has another type") as caught:
        rows_of(source)
    assert caught.value.expected == expected


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = source_of(tmp_path, {"text": ["a"]}, tokenizer=str(tmp_path / "none.json"))
    with pytest.raises(DatasetError, match=r"none\.json: not a readable tokenizer"):
        missing.partition(DAY)
    (tmp_path / "none.json").write_text("{}")
    (shard,) = missing.partition(DAY).shards
    with pytest.raises(DatasetError, match=r"none\.json: not a readable tokenizer"):
        missing.open(shard)


def test_what_is_read_hangs_on_the_tokenizers_words_not_on_its_place(tmp_path: Path, tokenizer: str) -> None:
    source = source_of(tmp_path, {"text": ["a"]}, tokenizer=tokenizer)
    moved = tmp_path / "elsewhere.json"
    moved.write_text(Path(tokenizer).read_text())
    assert reading_of(replace(source, tokenizer=str(moved))) == reading_of(source)
    moved.write_text(moved.read_text().replace('"late": 5', '"late": 6'))
    assert reading_of(replace(source, tokenizer=str(moved))) != reading_of(source)
    assert reading_of(replace(source, truncate=True)) != reading_of(source)


@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        ((IDS, VALUES, MASK), {"max_length": 6}),
        ((replace(IDS, shape=(-1, 2)),), {"max_length": 6}),
        ((IDS,), {}),
        ((TensorSpec("x", "float32"),), {"max_length": 6}),
        ((TensorSpec("x", "float32"),), {"tokenizer": "t.json"}),
    ],
)
def test_one_input_may_differ_in_length_beside_its_mask(inputs: Any, settings: dict[str, Any]) -> None:
    columns = {spec.name: ("text",) for spec in inputs if not spec.mask}
    with pytest.raises(SpecError, match="not an input whose rows differ in length"):
        ParquetSource("days", inputs, columns, **settings)


def test_a_sample_of_several_days_is_padded_no_further_than_each_batch_needs(tmp_path: Path, tokenizer: str) -> None:
    source = source_of(tmp_path, {"text": ["a", "a b c", "a b"], "n": [1, 3, 2]}, tokenizer=tokenizer, label="n")
    other = tmp_path / "days" / "2026-03-02"
    other.mkdir()
    pq.write_table(pa.table({"text": ["c c c c c", None, "late"], "n": [5, 0, 1]}), other / "part.parquet")
    sample = sample_rows(source, [DAY, "2026-03-02"], 10, 0, labelled=True)
    assert sample.lengths is not None and sample.lengths.tolist() == [5, 3, 2, 1, 1]
    assert sample.labels is not None and sample.labels.tolist() == [5, 3, 2, 1, 1]
    batches = list(sample.batches(2))
    assert [one["ids"].shape for one in batches] == [(2, 5), (2, 2), (1, 1)]
    assert batches[1]["ids"].tolist() == [[2, 3], [batches[1]["ids"][1, 0], IDS.filler]]
    assert batches[1]["mask"].tolist() == [[True, True], [True, False]]


def test_a_text_in_which_the_tokenizer_panics_costs_its_row_alone(tmp_path: Path, tokenizer: str) -> None:
    class Panic(BaseException):
        """What a panic of the library's is: no `Exception`."""

    class Panicking:
        def encode_batch_fast(self, texts: list[str]) -> Any:
            if "b" in texts:
                raise Panic
            return [SimpleNamespace(ids=[len(text)]) for text in texts]

    rows = tokens_of(["a", "b", "aaa"], Panicking(), IDS, 6, "text")
    assert rows.values.tolist() == [1, IDS.filler, 3] and rows.bad == {1: "column 'text' cannot be tokenised"}


@pytest.mark.parametrize("column", [pa.array([[], None]), pa.nulls(2)], ids=["empty lists", "nulls"])
def test_a_file_without_a_single_value_costs_its_rows_alone(tmp_path: Path, column: Any) -> None:
    found, _ = rows_of(source_of(tmp_path, {"text": column}))
    assert found[1] == "column 'text' is null" and found[0] in ("column 'text' is empty", "column 'text' is null")


def test_lists_are_not_cut(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="`truncate` with a `tokenizer` only"):
        source_of(tmp_path, {"text": [[1]]}, truncate=True)
