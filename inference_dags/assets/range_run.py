"""What Dagster is told about each day of a run over several."""

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg

from gpu_runtime.errors import InferenceError

_SHOWN = 10
"""Errors of so many days are shown in full; the run's log has all."""


class RangeRun:
    """Logs each day as soon as it is done, as a run of that day alone would.

    Dagster itself writes one event for each partition at the end of a step, all with one data version, and none if
    the step fails. But each day has inputs of its own, and the days before a crash are published. So a day's event is
    logged here, with the tags by which Dagster knows what is fresh, and again by `repeat` once Dagster's own events
    are written: the last one counts. Days that fail are collected, and end the step once the others are done.

    `inputs`: the asset's upstream keys, and whether the day's own partition of each is meant. A range of a single day
    is a range, too: Dagster gives its checks no partition. Upstream versions are those from before the first day: what
    arrives while the run is under way makes its day stale.
    """

    def __init__(self, context: dg.AssetExecutionContext, key: dg.AssetKey, inputs: Mapping[dg.AssetKey, bool]) -> None:
        self._context, self._key = context, key
        shared = self._versions(None, [upstream for upstream, daily in inputs.items() if not daily])
        own = [upstream for upstream, daily in inputs.items() if daily]
        self._upstream = {day: shared | self._versions(day, own) for day in context.partition_keys}
        self._logged: list[dg.AssetMaterialization] = []
        self._outcomes: dict[str, list[str]] = {}
        self._failed: dict[str, Exception] = {}

    def done(
        self,
        day: str,
        outcome: str,
        data_version: str,
        metadata: Mapping[str, Any],
        checks: Iterable[dg.AssetCheckResult] = (),
    ) -> None:
        """`outcome`: what became of the day, in a word."""
        self._context.log.info(f"{day}: {outcome}")
        self._outcomes.setdefault(outcome, []).append(day)
        event = dg.AssetMaterialization(self._key, partition=day, metadata=metadata, tags=self._tags(day, data_version))
        self._context.log_event(event)
        self._logged.append(event)
        for check in checks:
            assert check.check_name is not None
            self._context.log_event(
                dg.AssetCheckEvaluation(
                    self._key,
                    check.check_name,
                    check.passed,
                    check.metadata,
                    severity=check.severity,
                    blocking=self._context.assets_def.get_spec_for_check_key(
                        dg.AssetCheckKey(self._key, check.check_name)
                    ).blocking,
                    partition=day,
                )
            )

    def failed(self, day: str, error: Exception) -> None:
        self._context.log.error(f"{day} failed: {_text(error)}{origin(error)}")
        self._failed[day] = error

    def check(self) -> None:
        """Raise `Failure` with the list of the days that failed, if any did."""
        if not self._failed:
            return
        days, outcomes = self._context.partition_keys, dict(self._outcomes)
        tried = {*self._failed, *(day for found in outcomes.values() for day in found)}
        if len(tried) < len(days):
            outcomes["not tried"] = [day for day in days if day not in tried]
        outcomes["failed"] = list(self._failed)
        counts = ", ".join(f"{len(found)} {outcome}" for outcome, found in outcomes.items())
        shown = " | ".join(
            f"{day}: {_text(error)}{origin(error)}" for day, error in list(self._failed.items())[:_SHOWN]
        )
        raise dg.Failure(
            f"of {len(days)} days: {counts} ({', '.join(self._failed)}). {shown}",
            metadata={outcome.replace(" ", "_"): found for outcome, found in outcomes.items()},
            allow_retries=True,
        ) from None

    def repeat(self) -> None:
        for event in self._logged:
            self._context.log_event(event)

    def _tags(self, day: str, data_version: str) -> dict[str, str]:
        return self._upstream[day] | {
            "dagster/code_version": str(self._context.assets_def.code_versions_by_key[self._key]),
            "dagster/data_version": data_version,
            "dagster/data_version_is_user_provided": "true",
        }

    def _versions(self, day: str | None, inputs: Iterable[dg.AssetKey]) -> dict[str, str]:
        tags: dict[str, str] = {}
        for key in inputs:
            wanted = dg.AssetRecordsFilter(key, asset_partitions=[day] if day else None)
            found = self._context.instance.fetch_materializations(wanted, limit=1).records
            latest = found[0].asset_materialization if found else None
            version = (latest.tags or {}).get("dagster/data_version") if latest else None
            tags[f"dagster/input_data_version/{key.to_user_string()}"] = version or "INITIAL"
            tags[f"dagster/input_event_pointer/{key.to_user_string()}"] = str(found[0].storage_id) if found else "NULL"
        return tags


def origin(error: BaseException) -> str:
    """Where an error's causes came from: types and places in the code. Of texts only the operating system's: a
    library's may quote a cell, and Dagster keeps whatever an exception drags along."""
    places = []
    cause = error.__cause__
    while cause is not None:
        last = traceback.extract_tb(cause.__traceback__)[-1:]
        text = f" ({cause})" if isinstance(cause, OSError) else ""
        places += [f"{type(cause).__name__}{text} at {one.filename}:{one.lineno}, in {one.name}" for one in last]
        cause = cause.__cause__
    return "".join(f"; caused by {place}" for place in places)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, InferenceError) else f"{type(error).__name__}: {error}"
