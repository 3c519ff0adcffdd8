"""The code location from the command line, as CI uses it: subprocesses and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_runtime.predictions.delta_table import PredictionTable

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def run(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A console script of this environment, with a home of its own and no Dagster instance but a temporary one."""
    environment = {k: v for k, v in os.environ.items() if k != "DAGSTER_HOME"}
    environment["INFERENCE_DAGS_HOME"] = str(home)
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def materialize(home: Path, select: str, *more: str) -> subprocess.CompletedProcess[str]:
    return run(home, "dagster", "asset", "materialize", "-m", "inference_dags.definitions", "--select", select, *more)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the flight_delay lifecycle was materialized by two commands."""
    home = tmp_path_factory.mktemp("home")
    landed = materialize(home, "flight_delay/flights", "--partition-range", "2013-01-01...2013-06-30")
    assert landed.returncode == 0, landed.stderr[-3000:]
    gate_days = materialize(home, "flight_delay/flights", "--partition-range", "2013-10-01...2013-12-29")
    assert gate_days.returncode == 0, gate_days.stderr[-3000:]
    stages = ("onnx_model", "calibration", "int8_model", "engine", "benchmark", "serving_plan")
    made = materialize(home, ",".join(f"flight_delay/{stage}" for stage in stages))
    assert made.returncode == 0, made.stderr[-3000:]
    return home


def test_a_bare_job_that_only_has_the_stores_scores_a_day(home: Path) -> None:
    scored = materialize(home, "flight_delay/flights,flight_delay/predictions", "--partition", "2013-09-05")
    assert scored.returncode == 0, scored.stderr[-3000:]
    table = PredictionTable(home / "tables" / "flight_delay")
    day = table.read_day("2013-09-05")
    assert len(day) > 900 and day["probability"].between(0, 1).all()
    report = table.read_run("2013-09-05")
    assert report is not None and report["rows_in"] == len(day) + len(table.read_quarantine("2013-09-05"))


def test_dg_launch_scores_a_day(home: Path) -> None:
    assets = "flight_delay/flights,flight_delay/predictions"
    launched = run(home, "dg", "launch", "--assets", assets, "--partition", "2013-09-06")
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert PredictionTable(home / "tables" / "flight_delay").current_publication("2013-09-06")


def test_naive_min_max_int8_is_refused_and_another_recipe_serves(home: Path) -> None:
    from gpu_runtime.device.host import cpu_class
    from gpu_runtime.promotion.store import PromotionStore

    plan = PromotionStore(home / "artifacts").current("flight_delay", cpu_class()).plan
    assert ":int8-" in plan.engine and not plan.engine.endswith("minmax")
    assert "int8-vnni-minmax (auc" in plan.reason


def test_scoring_without_a_plan_fails_and_says_what_to_do(tmp_path: Path) -> None:
    landed = materialize(tmp_path, "flight_delay/flights", "--partition", "2013-09-05")
    assert landed.returncode == 0
    refused = materialize(tmp_path, "flight_delay/predictions", "--partition", "2013-09-05")
    assert refused.returncode == 1
    assert "materialize flight_delay/benchmark and flight_delay/serving_plan" in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    ("select", "more"),
    [
        ("flight_delay/nothing", ()),
        ("flight_delay/flights", ()),
        ("flight_delay/flights", ("--partition", "2014-01-01")),
    ],
    ids=["unknown asset", "no partition", "unknown partition"],
)
def test_a_wrong_request_ends_with_an_error(tmp_path: Path, select: str, more: tuple[str, ...]) -> None:
    assert materialize(tmp_path, select, *more).returncode != 0
