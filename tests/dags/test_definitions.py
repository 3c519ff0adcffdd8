"""The code location as users load it."""

from __future__ import annotations

import dagster as dg
import pytest

from inference_dags.definitions import defs
from inference_dags.pipeline import days_between

STAGES = {"onnx_model", "calibration", "int8_model", "engine", "benchmark", "serving_plan", "predictions"}


@pytest.fixture(scope="module")
def definitions() -> dg.Definitions:
    loaded = defs()
    dg.Definitions.validate_loadable(loaded)
    return loaded


@pytest.mark.parametrize(("model", "inputs"), [("flight_delay", "flights"), ("photo_tags", "photos")])
def test_a_folder_with_defs_yaml_is_a_whole_lifecycle(definitions: dg.Definitions, model: str, inputs: str) -> None:
    graph = definitions.resolve_asset_graph()
    keys = {key for key in graph.get_all_asset_keys() if key.path[0] == model}
    assert keys == {dg.AssetKey([model, name]) for name in STAGES | {inputs}}
    predictions = graph.get(dg.AssetKey([model, "predictions"]))
    assert {key.path[-1] for key in predictions.parent_keys} == {"serving_plan", inputs}
    assert all(graph.get(key).code_version for key in keys)
    assert definitions.resolve_job_def(f"{model}_daily") and definitions.resolve_schedule_def(f"{model}_nightly")
    checks = {check.name for check in graph.asset_check_keys if check.asset_key.path[0] == model}
    day_checks = {"row_accounting", "quarantined_fraction", "finite_outputs", "output_drift"}
    assert checks == {"parity", "gate"} | day_checks
    for check in (graph.get(found) for found in graph.asset_check_keys if found.asset_key == predictions.key):
        assert check.partitions_def == predictions.partitions_def
        assert check.blocking is (check.key.name != "output_drift")


def test_the_resources_can_be_moved_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_DAGS_HOME", "/somewhere/else")
    monkeypatch.setenv("INFERENCE_DAGS_DEVICE", "cuda:3")
    resources = defs().resources or {}
    assert resources["artifacts"].root == "/somewhere/else/artifacts"
    assert resources["gpu"].device == "cuda:3"


def test_days_are_calendar_days_also_over_a_clock_change() -> None:
    assert days_between("2013-03-09...2013-03-11") == ("2013-03-09", "2013-03-10", "2013-03-11")
    assert days_between("2013-03-09") == ("2013-03-09",)
    with pytest.raises(ValueError, match="before the first"):
        days_between("2013-03-09...2013-03-08")
