"""A promoted model with a day to score, made once; each test kills runs on a copy of its own."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def crashes() -> Any:
    """The module beside this file, which `soak.py` uses too."""
    name = "crashes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("crashes.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def unscored(crashes: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A home in which the day waits to be scored. Never scored itself."""
    return crashes.make_home(tmp_path_factory.mktemp("faults") / "unscored")


@pytest.fixture(scope="session")
def uninterrupted(unscored: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The day as a run gives it that nobody disturbed."""
    home = unscored.copy(tmp_path_factory.mktemp("faults") / "uninterrupted")
    done = home.materialize()
    assert done.returncode == 0, done.stderr[-3000:]
    return home.day()


@pytest.fixture
def fresh_home(unscored: Any, tmp_path: Path) -> Callable[[], Any]:
    """Makes copies of the unscored home."""
    numbers = itertools.count()
    return lambda: unscored.copy(tmp_path / f"home-{next(numbers)}")
