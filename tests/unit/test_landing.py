"""The demo's own data: real, deterministic, and untouched when it is landed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inference_dags.defs.flight_delay.land import land as land_flights
from inference_dags.defs.photo_tags.land import land as land_photos

LANDINGS = [(land_flights, "2013-05-06"), (land_photos, "2026-02-03")]


@pytest.mark.parametrize(("land", "day"), LANDINGS, ids=["flights", "photos"])
def test_landing_a_day_again_changes_no_file(land: Callable[[str, Path], None], day: str, tmp_path: Path) -> None:
    land(day, tmp_path)
    first = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    land(day, tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == first
    assert not [name for name in first if name.startswith(".")]


@pytest.mark.parametrize(("land", "day"), LANDINGS, ids=["flights", "photos"])
def test_a_spoiled_file_is_landed_anew(land: Callable[[str, Path], None], day: str, tmp_path: Path) -> None:
    land(day, tmp_path)
    path = sorted(tmp_path.iterdir())[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    land(day, tmp_path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(("land", "day"), [(land_flights, "2014-01-01"), (land_photos, "yesterday")])
def test_a_day_that_cannot_be_landed_is_a_clear_error(
    land: Callable[[str, Path], None], day: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="expected"):
        land(day, tmp_path)
    assert list(tmp_path.iterdir()) == []
