"""A model whose rows differ in length, from its export to its published day."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from deltalake import DeltaTable

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.engine_set import build_engines
from gpu_runtime.backends.onnxruntime_backend import OnnxRuntimeContext
from gpu_runtime.benchmark import report as report_module
from gpu_runtime.benchmark.measure import Setting, measure
from gpu_runtime.benchmark.report import Sweep, run_benchmark, run_rows
from gpu_runtime.benchmark.trial import Feed
from gpu_runtime.datasets import parquet as parquet_module
from gpu_runtime.datasets import sample as sample_module
from gpu_runtime.datasets.batching import Batching
from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.datasets.sample import sample_rows
from gpu_runtime.device.host import HostDevice, cpu_class
from gpu_runtime.errors import ExportError, SpecError
from gpu_runtime.export.onnx_export import export_model
from gpu_runtime.predictions.delta_table import PredictionTable
from gpu_runtime.predictions.shard_file import PredictionSchema
from gpu_runtime.promotion.plan import ServingPlan, choose_plan
from gpu_runtime.quality.gate import GatePolicy
from gpu_runtime.quantize.calibration import calibrate
from gpu_runtime.quantize.int8 import Int8Recipe, quantize
from gpu_runtime.scoring import Scorer, ScoringPolicy, score_partition
from gpu_runtime.specs import ModelSpec, OnnxSource, TensorSpec, TorchSource, to_plain

DAY = "2026-03-01"
IDS = TensorSpec("ids", "int32", (-1,), minimum=0, maximum=49)
MASK = TensorSpec("mask", "int32", (-1,), mask=True)
LENGTHS = (4, 9, 16)


class Bag(torch.nn.Module):
    """The mean over a row's tokens; of those that the mask shows, unless `careless`."""

    def __init__(self, careless: bool = False, pooled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 4)
        self._careless, self._pooled = careless, pooled

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shown = mask.to(torch.float32).unsqueeze(-1)
        values = torch.tanh(self.linear(self.embedding(ids)))
        if not self._pooled:
            return values * shown
        return values.mean(1) + 0 * shown.sum(1) if self._careless else (values * shown).sum(1) / shown.sum(1)


def bag() -> torch.nn.Module:
    return Bag()


def careless() -> torch.nn.Module:
    return Bag(careless=True)


def unpooled() -> torch.nn.Module:
    return Bag(pooled=False)


def spec_of(factory: str, **changes: Any) -> ModelSpec:
    given = {"max_batch": 8, "max_length": LENGTHS[-1]} | changes
    return ModelSpec("bag", "1", TorchSource(f"{__name__}:{factory}"), (IDS, MASK), ("vector",), **given)


@pytest.fixture(scope="module")
def served_bag(serve: Any) -> Any:
    made = serve(spec_of("bag"))
    made.plan = replace(made.plan, batch=20, lengths=LENGTHS)
    return made


def expected(ids: list[int]) -> Any:
    """What the module gives for the row alone, without any padding."""
    with torch.inference_mode():
        row = torch.tensor([ids], dtype=torch.int32)
        return Bag().eval()(row, torch.ones_like(row))[0].numpy()


@pytest.fixture
def rows() -> list[Any]:
    """Sequences of 1 … 16 ids, two of which cannot be scored."""
    draw = np.random.default_rng(0)
    found: list[Any] = [draw.integers(0, 50, draw.integers(1, 17)).tolist() for _ in range(60)]
    found[7], found[31] = [1, 50], None
    return found


@pytest.fixture
def source(tmp_path: Path, rows: list[Any]) -> ParquetSource:
    folder = tmp_path / "days" / DAY
    folder.mkdir(parents=True)
    columns = {"tokens": pa.array(rows, pa.list_(pa.int32())), "n": [0 if row is None else len(row) for row in rows]}
    pq.write_table(pa.table(columns), folder / "part.parquet", row_group_size=25)
    return ParquetSource(
        str(tmp_path / "days"),
        (IDS, MASK),
        {"ids": ("tokens",)},
        label="n",
        rows_per_shard=25,
        max_length=LENGTHS[-1],
    )


def test_the_graph_takes_any_length_and_says_how_long(served_bag: Any) -> None:
    graph = served_bag.exported.graph()
    assert (graph.max_length, graph.inputs) == (16, (IDS, MASK))
    dims = [value.type.tensor_type.shape.dim for value in onnx.load(graph.path).graph.input]
    assert [[dim.dim_param for dim in one] for one in dims] == [["batch", "length"]] * 2
    for length in (1, 5, 16):
        ids = np.arange(3 * length, dtype=np.int32).reshape(3, length) % 50
        found = served_bag.run({"ids": ids, "mask": np.ones_like(ids)})["vector"]
        np.testing.assert_allclose(found, [expected(one.tolist()) for one in ids], atol=1e-5)


def test_a_model_that_reads_its_padding_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(ExportError, match=r"'vector' depends on its padding.*mask: true"):
        export_model(spec_of("careless"), store)


def test_an_output_that_grows_with_the_length_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(ExportError, match=r"bag\.vector: an output grows with the length.*pool over the length"):
        export_model(spec_of("unpooled"), store)


def test_a_file_of_one_length_is_refused(served_bag: Any, store: ArtifactStore, tmp_path: Path) -> None:
    model = onnx.load(served_bag.exported.graph().path)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 16
    onnx.save(model, tmp_path / "fixed.onnx")
    with pytest.raises(ExportError, match=r"bag\.ids: its length is fixed.*dynamic length, 1 … 16.*Got 16"):
        export_model(replace(spec_of("bag"), source=OnnxSource(str(tmp_path / "fixed.onnx"))), store)


@pytest.mark.parametrize(
    ("inputs", "max_length", "what"),
    [
        ((IDS, MASK), None, "max_length does not fit the inputs"),
        ((TensorSpec("x", "float32"),), 8, "max_length does not fit the inputs"),
        ((MASK, TensorSpec("x", "float32")), 8, "a mask of nothing"),
    ],
)
def test_a_longest_row_is_declared_where_rows_differ_and_only_there(inputs: Any, max_length: Any, what: str) -> None:
    with pytest.raises(SpecError, match=what):
        ModelSpec("m", "1", OnnxSource("m.onnx"), inputs, ("y",), max_length=max_length)


def test_a_shape_has_one_free_dimension_and_a_mask_is_plain() -> None:
    with pytest.raises(SpecError, match="not a row's shape"):
        TensorSpec("x", "float32", (-1, -1))
    with pytest.raises(SpecError, match="cannot be a mask"):
        TensorSpec("mask", "int32", (-1, 2), mask=True)
    with pytest.raises(SpecError, match="cannot be a mask"):
        TensorSpec("mask", "int32", (-1,), maximum=1, mask=True)


@pytest.mark.parametrize("rows_at_once", [1_000, 7], ids=["whole shards", "parts of shards"])
def test_a_day_is_published_in_its_own_order_and_each_row_is_what_it_is_alone(
    served_bag: Any,
    source: ParquetSource,
    rows: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows_at_once: int,
) -> None:
    monkeypatch.setattr(parquet_module, "_RAGGED_ROWS_AT_ONCE", rows_at_once)
    table = PredictionTable(tmp_path / "table")
    schema = PredictionSchema(served_bag.exported.graph().outputs, {})
    with HostDevice() as device, Scorer(served_bag.plan, served_bag.store, device, ScoringPolicy(0.5)) as scorer:
        made = score_partition(scorer, source.partition(DAY), source, schema, table, "run")
        again = score_partition(scorer, source.partition(DAY), source, schema, table, "run")
    assert (made.rows_in, made.scored, made.quarantined, made.accounted, again.reused) == (60, 58, 2, True, True)
    held = DeltaTable(table.predictions.uri)
    files = sorted(held.file_uris())  # one a shard, in the shards' order
    found = pa.concat_tables([pq.ParquetFile(file).read() for file in files]).to_pylist()
    good = [row for row in range(60) if row not in (7, 31)]
    assert [row["source_position"] for row in found] == good
    np.testing.assert_allclose([row["vector"] for row in found], [expected(rows[row]) for row in good], atol=1e-5)
    elements = sum(len(row) for row in rows if row) + 1  # no row is shorter than that
    assert made.report["run"]["elements"] == elements
    assert made.report["padding"] == made.report["padded_elements"] / elements > 0


def test_the_gate_sees_each_row_as_the_reference_does(served_bag: Any, source: ParquetSource) -> None:
    sample = sample_rows(source, [DAY], 40, 0, labelled=True)
    assert sample.lengths is not None and sample.labels is not None
    assert sample.labels.tolist() == sample.lengths.tolist()  # the label of each row went along with it
    engine = served_bag.engines.engines["onnxruntime:fp32"]
    with HostDevice() as device:
        found = run_rows(engine, device, sample, "vector")
    alone = [expected(ids[:length].tolist()) for ids, length in zip(sample.inputs["ids"], sample.lengths, strict=True)]
    np.testing.assert_allclose(found, alone, atol=1e-5)


def test_what_cannot_run_the_longest_row_fails_before_the_night(
    served_bag: Any, source: ParquetSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = sample_rows(source, [DAY], 40, 0)
    assert sample.lengths is not None
    short = int(np.flatnonzero(sample.lengths < 9)[0])
    rows = replace(
        sample,
        inputs={name: values[short:, :8] for name, values in sample.inputs.items()},
        lengths=sample.lengths[short:],
    )
    run: list[int] = []
    enqueue = OnnxRuntimeContext.enqueue

    def noted(context: Any, inputs: Any, *given: Any) -> None:
        run.append(inputs["ids"].shape[1])
        enqueue(context, inputs, *given)

    monkeypatch.setattr(OnnxRuntimeContext, "enqueue", noted)
    file = served_bag.engines.engines["onnxruntime:fp32"]
    with HostDevice() as device:
        measure({file.key: file}, [Setting(file.key, 32, 1, 1, (4, 8, 16))], device, rows, rounds=1, round_s=0.001)
    assert run[:2] == [16, 16] and set(run[2:]) <= {4, 8}  # in both slots of the stream


def test_the_memory_of_a_setting_has_that_of_the_longest_row_in_it(serve: Any, source: ParquetSource) -> None:
    longest = 1 << 18
    file = serve(spec_of("bag", max_batch=1, max_length=longest)).engines.engines["onnxruntime:fp32"]
    sample = sample_rows(source, [DAY], 40, 0)
    with HostDevice() as device:
        setting = Setting(file.key, 48, 1, 1, (16, longest))
        (one,) = measure({file.key: file}, [setting], device, sample, rounds=1, round_s=0.001)
    slots_mib = 2 * sum(spec.nbytes(1, longest) for spec in file.inputs) / 2**20
    embedded_mib = 8 * 4 * longest / 2**20
    assert one.memory_mib is not None and one.memory_mib > slots_mib + embedded_mib


def test_a_setting_without_memory_for_the_longest_row_leaves_no_thread_behind(
    served_bag: Any, source: ParquetSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failure, and through that its engine's memory, would live on with the thread; the next setting needs it."""

    def no_room(context: Any, inputs: Any, outputs: Any, stream: Any) -> None:
        def run() -> None:
            raise MemoryError

        stream.launch(run)

    monkeypatch.setattr(OnnxRuntimeContext, "enqueue", no_room)
    file, sample = served_bag.engines.engines["onnxruntime:fp32"], sample_rows(source, [DAY], 40, 0)
    with HostDevice() as device:
        before = set(threading.enumerate())
        with pytest.raises(MemoryError):
            measure({file.key: file}, [Setting(file.key, 32, 2, 1, (4, 8, 16))], device, sample)
        assert not set(threading.enumerate()) - before


def test_an_engine_that_fails_on_the_longest_row_costs_only_itself(
    served_bag: Any, source: ParquetSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = sample_rows(source, [DAY], 40, 0)
    built = build_engines(
        "bag", [served_bag.exported.graph()], ["onnxruntime", "openvino"], cpu_class(), served_bag.store
    )
    enqueue = OnnxRuntimeContext.enqueue

    def short_only(context: Any, inputs: Any, *given: Any) -> None:
        if (inputs["ids"] == IDS.filler).all():
            raise RuntimeError("no kernel")
        enqueue(context, inputs, *given)

    monkeypatch.setattr(OnnxRuntimeContext, "enqueue", short_only)
    sweep = Sweep(budgets=(16,), finalists=1, rounds=1, round_s=0.01, probe_s=0.005, trial_rounds=0)
    policy = GatePolicy("cosine", "vector", 0.02, min_speedup=0.0)
    with HostDevice() as device:
        report = run_benchmark(
            served_bag.spec,
            "declared",
            built,
            served_bag.exported.graph(),
            sample,
            policy,
            sweep,
            device,
            served_bag.store,
        )
    assert [result.engine for result in report.passed] == ["openvino:fp32"]
    refused = next(result for result in report.results if result.engine == "onnxruntime:fp32")
    assert refused.verdict.reasons == ("failed here: RuntimeError: no kernel",) and not refused.tried


def test_long_rows_are_given_to_the_gate_a_few_at_a_time(source: ParquetSource, monkeypatch: Any) -> None:
    monkeypatch.setattr(sample_module, "_ELEMENTS", 24)
    sample = sample_rows(source, [DAY], 40, 0)
    shapes = [batch["ids"].shape for batch in sample.batches(4)]
    assert sum(rows for rows, _ in shapes) == sample.rows and max(rows for rows, _ in shapes) == 4
    assert all(rows * length <= 24 or rows == 1 for rows, length in shapes)


@pytest.mark.parametrize(
    ("lengths", "given", "tried"),
    [
        ((64, 256), (512, 1024, 2048, 4096), [512, 1024, 2048]),  # the engine takes no more than 8 rows of 256
        ((64, 8_192), (64, 100, 127, 128), [127, 128, 8_192]),  # up to 127 every row goes alone
        ((10_000, 1_000_000), (512, 1024, 2048, 4096), [4096, 1_000_000]),
    ],
)
def test_every_budget_that_cuts_differently_is_tried_and_one_as_large_as_the_longest_row(
    served_bag: Any, lengths: tuple[int, ...], given: tuple[int, ...], tried: list[int]
) -> None:
    engine = served_bag.engines.engines["onnxruntime:fp32"]
    assert engine.max_batch == 8
    settings = Sweep(budgets=given).settings(engine, lengths)
    assert list(dict.fromkeys(one.batch for one in settings)) == tried


def test_the_gate_gives_an_engine_few_long_rows_at_once(
    served_bag: Any, source: ParquetSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "_GATE_ELEMENTS", 24)
    shapes: list[tuple[int, int]] = []
    enqueue = OnnxRuntimeContext.enqueue

    def noted(context: Any, inputs: Any, *given: Any) -> None:
        shapes.append(inputs["ids"].shape)
        enqueue(context, inputs, *given)

    monkeypatch.setattr(OnnxRuntimeContext, "enqueue", noted)
    with HostDevice() as device:
        run_rows(served_bag.engines.engines["onnxruntime:fp32"], device, sample_rows(source, [DAY], 40, 0), "vector")
    assert max(rows for rows, _ in shapes) > 1 and all(rows * length <= 24 or rows == 1 for rows, length in shapes)


def test_the_benchmark_finds_a_budget_and_lengths_and_the_plan_scores_with_them(
    served_bag: Any, source: ParquetSource, tmp_path: Path
) -> None:
    store, exported = served_bag.store, served_bag.exported
    sample = sample_rows(source, [DAY], 40, 0)
    found = calibrate(exported, sample.batches(8), sample.digest, store)
    int8 = quantize(exported, found, (Int8Recipe("vnni"),), store).graphs()
    assert [graph.max_length for graph in int8] == [LENGTHS[-1]]
    built = build_engines("bag", [exported.graph(), *int8], ["onnxruntime", "openvino"], cpu_class(), store)
    policy = GatePolicy("cosine", "vector", 0.02, min_speedup=0.0)
    sweep = Sweep(budgets=(16, 48), rounds=1, round_s=0.01, probe_s=0.005, trial_rounds=1, trial_s=0.01)
    with HostDevice() as device:
        feed = Feed(source, (DAY,))
        report = run_benchmark(
            served_bag.spec, "declared", built, exported.graph(), sample, policy, sweep, device, store, feed=feed
        )
        assert {result.engine: result.verdict.passed for result in report.results} == {
            f"{backend}:{variant}": True
            for backend in ("onnxruntime", "openvino")
            for variant in ("fp32", "int8-vnni-minmax")
        }
        settings = {one.setting for result in report.results for one in result.tried}
        assert {setting.batch for setting in settings} == {16, 48}
        (lengths,) = {setting.lengths for setting in settings}
        assert set(lengths) <= set(range(1, 17)) and lengths[-1] == 16
        plan = choose_plan(
            report,
            declaration="declared",
            engine_set=built.digest,
            gate_set=sample.digest,
            policy=policy,
            device_class=cpu_class(),
        )
        assert plan.lengths == lengths and plan.batch in (16, 48) and "budget of" in plan.reason
        plan = ServingPlan.from_plain(json.loads(json.dumps(to_plain(plan))))
        table, schema = PredictionTable(tmp_path / "table"), PredictionSchema(exported.graph().outputs, {})
        with Scorer(plan, store, device, ScoringPolicy(0.5)) as scorer:
            made = score_partition(scorer, source.partition(DAY), source, schema, table, "run")
            assert scorer.executor.ceiling.batching == Batching(plan.batch, 8, lengths)
    assert (made.scored, made.quarantined, made.accounted) == (58, 2, True)
