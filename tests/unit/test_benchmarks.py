"""The benchmarks' harness, and that the smallest of them runs. Nothing here looks at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
    text = markdown(report)
    assert "| peer: idle | peer | 4.000 | 2 | 2.00 | 50.0% |" in text
    assert "- not run: other (ValueError: no)" in text
    assert "smoke" not in text


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


def test_credit_runs_and_a_peer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/credit.py", "--smoke", "--work", str(tmp_path), "--only", "ours", "ray"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "smoke" / "results" / "credit.json").read_text())
    assert [one["name"] for one in report["entrants"] if one["role"] == "ours"] == ["ours"]
    assert {one["name"] for one in report["entrants"]} | set(report["not_run"]) == {"ours", "ray"}
    assert str(tmp_path) not in json.dumps(report)


def test_scale_compares_files_and_shards_of_the_same_rows(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/scale.py", "--smoke", "--work", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "smoke" / "results" / "scale.json").read_text())
    assert report["not_run"] == {}
    assert {one["same_answers"] for one in report["entrants"] if one["role"] != "part"} == {1.0}
    assert report["derived"].keys() > {"100 files ÷ one file, goal 0.7", "10 shards ÷ 1 shard", "100 shards ÷ 1 shard"}
