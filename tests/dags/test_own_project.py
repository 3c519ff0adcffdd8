"""A project of one's own, set up as the README says, with a `resources` package of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def list_assets(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "dagster"), "asset", "list", "-m", "my_project.definitions"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def own_project(tmp_path: Path) -> Path:
    """Every file is a code block of the README."""
    (settings,) = blocks("toml")
    (model,) = (block for block in blocks("yaml") if "type: inference_dags.InferencePipeline" in block)
    (definitions,) = (block for block in blocks("python") if "shared_resources" in block)
    churn = tmp_path / "my_project" / "defs" / "churn"
    churn.mkdir(parents=True)
    for package in ("my_project", "my_project/defs", "resources"):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(settings)
    (tmp_path / "my_project" / "definitions.py").write_text(definitions)
    (churn / "defs.yaml").write_text(model)
    return tmp_path


def test_the_readmes_own_project_loads(own_project: Path) -> None:
    listed = list_assets(own_project)
    assert listed.returncode == 0, listed.stderr[-3000:]
    assert {"churn/customers", "churn/onnx_model", "churn/predictions"} <= set(listed.stdout.split())


@pytest.mark.parametrize(
    ("line", "mistake", "told"),
    [
        ("  int8:", "  backends: [onnxruntim]\n  int8:", "unknown backend"),
        ("columns: {features: [age, visits, spend]}", "columns: {features: [age]}", "do not fill its shape"),
        ("    max_drop: 0.005", "    max_dorp: 0.005", "max_dorp"),
        ("    outputs: [probability]", "    outputs: [features]", "each name used once"),
        (
            "    outputs: [probability]",
            "    outputs: [probability]\n    output_ranges: {probabilty: {minimum: 0}}",
            "a range for what is no output",
        ),
    ],
    ids=["backend", "columns", "key", "output", "range"],
)
def test_a_mistake_in_defs_yaml_is_named(own_project: Path, line: str, mistake: str, told: str) -> None:
    file = own_project / "my_project" / "defs" / "churn" / "defs.yaml"
    text = file.read_text()
    assert line in text
    file.write_text(text.replace(line, mistake))
    listed = list_assets(own_project)
    assert listed.returncode != 0
    assert told in listed.stderr + listed.stdout


def test_the_readme_shows_only_pictures_that_are_there() -> None:
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert shown
    missing: list[Any] = [path for path in shown if not (ROOT / path).is_file()]
    assert not missing
