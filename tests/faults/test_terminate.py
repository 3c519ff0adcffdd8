"""Dagster's own terminate, through a real webserver and daemon: the run ends, the day can be resumed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LAUNCH = """mutation($assets: [AssetKeyInput!], $day: String!) { launchRun(executionParams: {
  selector: {repositoryLocationName: "location.py", repositoryName: "__repository__", jobName: "__ASSET_JOB",
             assetSelection: $assets},
  runConfigData: {}, mode: "default", executionMetadata: {tags: [{key: "dagster/partition", value: $day}]}})
  { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
TERMINATE = """mutation($run: String!) { terminateRun(runId: $run) { __typename } }"""
STATUS = """query($run: ID!) { runOrError(runId: $run) { ... on Run { status
  eventConnection { events { ... on MessageEvent { message } ... on ErrorEvent { error { message } } } } } } }"""


@pytest.fixture
def ask(fresh_home: Callable[[], Any], crashes: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """A webserver and a daemon on a fresh home whose batches are slow to write; asks it GraphQL questions."""
    home = fresh_home()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (home.root / "instance").mkdir()
    (home.root / "instance" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    environment = os.environ | {
        "DAGSTER_HOME": str(home.root / "instance"),
        "FAULTS_ROOT": str(home.root),
        "FAULTS_LOG": str(home.root / "log"),
        "FAULTS_SLOW": "0.05",
    }
    location = Path(__file__).with_name("location.py")
    dagster = str(Path(sys.executable).parent / "dagster")
    server = subprocess.Popen(
        [dagster, "dev", "-f", str(location), "-h", "127.0.0.1", "-p", str(port)],
        env=environment,
        stdout=(home.root / "dagster.log").open("w"),
        stderr=subprocess.STDOUT,
        # A process that is started in the background ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )

    def ask(query: str, **variables: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/graphql",
            json.dumps({"query": query, "variables": variables}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["data"]

    try:
        until(lambda: answers(ask))
        yield home, ask
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def answers(ask: Callable[..., Any]) -> bool:
    try:
        return bool(ask("{ version }"))
    except OSError:
        return False


def until(condition: Callable[[], bool], explain: Callable[[], Any] = str) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"it never came: {explain()}")


@pytest.mark.slow
def test_terminate_ends_a_run_and_the_next_one_resumes_it(
    ask: tuple[Any, Callable[..., Any]], uninterrupted: Any, crashes: Any
) -> None:
    home, question = ask
    launched = question(LAUNCH, assets=[{"path": ["tiny", "predictions"]}], day=crashes.DAY)["launchRun"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    run = launched["run"]["runId"]
    until(lambda: home.receipts() >= 2, lambda: question(STATUS, run=run))
    assert question(TERMINATE, run=run)["terminateRun"]["__typename"] == "TerminateRunSuccess"
    until(lambda: question(STATUS, run=run)["runOrError"]["status"] == "CANCELED")
    assert home.batches() < crashes.BATCHES / 2
    assert home.attempts_ended() == [True]
    receipts = home.receipts()
    finished = home.materialize()
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert home.day() == uninterrupted and home.leftovers() == []
    assert home.batches() == crashes.BATCHES - receipts * (crashes.BATCHES // crashes.SHARDS)
