"""The fuzz finds nothing in the decoders, and would find something in worse ones."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageFile

from gpu_runtime.datasets import parquet
from gpu_runtime.datasets.array_folder import ArrayReader
from gpu_runtime.datasets.image_folder import ImageReader
from gpu_runtime.datasets.parquet import ParquetReader

SCRIPT = Path(__file__).with_name("fuzz.py")


@pytest.fixture(scope="module")
def fuzz() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz_script", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("cases", "seed"), [(140, 7), pytest.param(3000, 11, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_corruption_crashes_loses_a_row_or_scores_it_wrong(cases: int, seed: int) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--cases", str(cases), "--seed", str(seed)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout
    last = ran.stdout.splitlines()[-1].split()
    assert (last[:2], last[-2:]) == (["all", str(cases)], ["0", "0"])
    assert ran.stderr == "", "no warning is printed, whatever the files hold"


def bad(fuzz: Any, prefix: str) -> list[str]:
    """What is wrong with the cases of some kinds, eight of each."""
    chosen = [case for case in range(8 * len(fuzz.KINDS)) if fuzz.KINDS[case % len(fuzz.KINDS)].startswith(prefix)]
    return [outcome.wrong for outcome in (fuzz.run_case(5, case) for case in chosen) if outcome.wrong]


def test_half_a_picture_would_be_noticed(fuzz: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzz.whole_rows() and not bad(fuzz, "image: cut")
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert any("other pixels" in wrong for wrong in bad(fuzz, "image: cut"))


@pytest.mark.parametrize(
    ("reader", "change", "kinds", "noticed"),
    [
        (ImageReader, lambda failures: [], "image: empty", "scored, though it is no picture"),
        (ParquetReader, lambda failures: [], "table: null", "but scored"),
        (ParquetReader, lambda failures: failures * 2, "table: null", "a row reported twice"),
        (ParquetReader, lambda failures: failures[1:], "table: all sorts", "scored"),
        (ParquetReader, lambda failures: failures[1:], "ragged: texts", ": None is ["),
    ],
    ids=["a silent image", "silent cells", "a row twice", "one row of a batch", "a silent text"],
)
def test_a_failure_that_is_not_told_or_told_twice_would_be_noticed(
    fuzz: Any, monkeypatch: pytest.MonkeyPatch, reader: Any, change: Any, kinds: str, noticed: str
) -> None:
    pieces = reader.pieces
    monkeypatch.setattr(
        reader,
        "pieces",
        lambda *args: [lambda p=p: change(p()) for p in pieces(*args)],  # type: ignore[misc]
    )
    assert any(noticed in wrong for wrong in bad(fuzz, kinds))


def test_a_wrong_value_would_be_noticed(fuzz: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    as_array = parquet._as_array

    def off_by_a_little(column: Any) -> Any:
        found = as_array(column)
        return None if found is None or found.dtype != np.float32 else np.nextafter(found, np.float32(0))

    monkeypatch.setattr(parquet, "_as_array", off_by_a_little)
    assert any("share was scored with another value" in wrong for wrong in bad(fuzz, "table: columns rearranged"))


@pytest.mark.parametrize(
    ("rows", "noticed"),
    [
        (lambda values, start, stop: values[start:stop] ^ 1, "with other values"),
        (lambda values, start, stop: values[::-1][start:stop], "with other values"),
        (lambda values, start, stop: np.roll(values, 1, axis=1)[start:stop], "with other values"),
    ],
    ids=["a bit", "another order", "moved"],
)
def test_another_row_of_an_array_would_be_noticed(
    fuzz: Any, monkeypatch: pytest.MonkeyPatch, rows: Any, noticed: str
) -> None:
    assert not bad(fuzz, "array")
    monkeypatch.setattr(ArrayReader, "_rows", lambda self, start, stop: rows(self._values, start, stop))
    assert any(noticed in wrong for wrong in bad(fuzz, "array: bytes flipped in the rows"))


@pytest.mark.parametrize(
    ("body", "said"),
    [("import os; os.abort()", "worker ended with -6"), ("import time; time.sleep(60)", "worker hung")],
    ids=["dies", "hangs"],
)
def test_a_worker_that_dies_or_hangs_is_a_crash_of_its_case(fuzz: Any, body: str, said: str) -> None:
    outcomes = fuzz.run_all(0, 2, command=(sys.executable, "-c", body), timeout_s=1.5)
    assert [outcome.case for outcome in outcomes] == [0, 1]
    assert all(outcome.crash.startswith(said) for outcome in outcomes)
    assert fuzz.report(0, outcomes).splitlines()[len(fuzz.KINDS) + 1].split()[-1] == "2"
