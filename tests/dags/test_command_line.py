"""The code location from the command line, as CI uses it: subprocesses and exit codes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_runtime.predictions.delta_table import PredictionTable
from inference_dags.defs.flight_delay.land import land
from inference_dags.pipeline import days_between

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
    """A home with landed days, in which the flight_delay lifecycle was materialized by one command."""
    home = tmp_path_factory.mktemp("home")
    for day in (*days_between("2013-01-01...2013-06-30"), *days_between("2013-10-01...2013-12-29")):
        folder = home / "data" / "flights" / day
        folder.mkdir(parents=True)
        land(day, folder)
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


@pytest.mark.slow
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
    folder = tmp_path / "data" / "flights" / "2013-09-05"
    folder.mkdir(parents=True)
    land("2013-09-05", folder)
    refused = materialize(tmp_path, "flight_delay/predictions", "--partition", "2013-09-05")
    assert refused.returncode == 1
    assert "materialize flight_delay/benchmark and flight_delay/serving_plan" in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    ("select", "more"),
    [
        pytest.param("flight_delay/nothing", (), marks=pytest.mark.slow),
        pytest.param("flight_delay/flights", (), marks=pytest.mark.slow),
        ("flight_delay/flights", ("--partition", "2014-01-01")),
    ],
    ids=["unknown asset", "no partition", "unknown partition"],
)
def test_a_wrong_request_ends_with_an_error(tmp_path: Path, select: str, more: tuple[str, ...]) -> None:
    assert materialize(tmp_path, select, *more).returncode != 0


def on_call_section() -> list[tuple[str, str]]:
    """The code blocks of the README's "When something goes wrong", in order: their language and their text."""
    section = (ROOT / "README.md").read_text().split("## When something goes wrong", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```(python|sh)\n(.*?)```", section, re.DOTALL)


def test_what_the_readme_tells_an_engineer_on_call_works_as_it_stands(home: Path, tmp_path: Path) -> None:
    """Every command and every query, run in the order of the page against a table of its own."""
    assets = "flight_delay/flights,flight_delay/predictions"
    first = materialize(home, assets, "--partition-range", "2013-09-02...2013-09-03")
    assert first.returncode == 0, first.stderr[-3000:]
    table = PredictionTable(home / "tables" / "flight_delay")
    day, before = "2013-09-02", table.published("2013-09-02")
    quarantined = len(table.read_quarantine(day))
    (tmp_path / "storage").symlink_to(home)
    asked: dict[str, Any] = {}
    for language, text in on_call_section():
        if language == "python":
            there = Path.cwd()
            os.chdir(tmp_path)
            try:
                exec(text, asked)
            finally:
                os.chdir(there)
            continue
        for line in text.strip().splitlines():
            done = run(home, *shlex.split(line))
            assert done.returncode == 0, (line, done.stderr[-3000:])
    assert len(asked["quarantine"]) == quarantined > 0
    assert asked["runs"]["rows_in"].tolist() == [len(table.read_day(day)) + quarantined]
    assert before is not None and table.current_publication(day) != before.number  # forced: replaced
    assert len(asked["before"]) == len(table.read_day(day))
    assert set(asked["before"]["run_id"]) != set(table.read_day(day)["run_id"])
