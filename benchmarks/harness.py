"""Measures entrants side by side: tuned alike, in interleaved rounds, each in a process of its own.

An entrant is a function that gets itself ready and yields a function that does the work once, into a given folder.
Every measurement is a fresh process, so no entrant's threads or servers run while another is timed, and a peer may run
in another environment than ours (`--peers-python`). Such a process is ready after `setup_s`, does the work once
unmeasured (caches, kernels, lazy imports), then `REPEATS` times measured.

Tuning: every entrant tries each of its settings, at most `MAX_SETTINGS` of them, in one such process of
`TUNING_REPEATS` runs, and goes into the rounds with the one of the fastest run. An entrant
that fails or hangs is left out, with the reason in the results. A benchmark whose single run is long says how many
rounds and repeats it takes instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from gpu_runtime.artifacts import write_atomically
from gpu_runtime.benchmark.environment import describe_environment

ROOT = Path(__file__).resolve().parents[1]
RESULTS, WORK = ROOT / "benchmarks" / "results", ROOT / "build" / "bench"
MAX_SETTINGS, TUNING_REPEATS, ROUNDS, REPEATS, LIMIT_S, SMOKE_LIMIT_S = 6, 2, 5, 3, 600, 120
OURS = "ours"

Case = Mapping[str, Any]
"""What all entrants of a benchmark share, as JSON. `rows`, and `facts` for the report, which may have a `name` of its
own; the rest is theirs."""

Setting = Mapping[str, Any]
Run = Callable[[Path], object]
Role = Literal["ours", "peer", "part"]

_PACKAGES = (
    "daft", "deltalake", "numpy", "onnxruntime", "opencv-python-headless", "openvino", "pandas", "pillow", "polars",
    "pyarrow", "ray", "torch",
)  # fmt: skip
_SILENCE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "DAFT_ANALYTICS_ENABLED": "0",
    "DO_NOT_TRACK": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Entrant:
    """`settings`: what tuning tries. `like`: runs with the setting chosen for that entrant instead, after it.

    A "part" is a stage alone: no rival, but what the bound is made of. It runs in our environment.
    """

    name: str
    what: str
    open: Callable[[Case, Setting], AbstractContextManager[Run]]
    role: Role = "peer"
    settings: tuple[Setting, ...] = ({},)
    like: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.settings) <= MAX_SETTINGS:
            raise ValueError(f"{self.name}: 1 … {MAX_SETTINGS} settings, so that all are tuned alike")


@dataclass(frozen=True)
class Sample:
    """One process: `seconds` and `cpu_s` (of the process itself, without children) of each measured run."""

    setup_s: float
    first_run_s: float
    seconds: Sequence[float]
    cpu_s: Sequence[float]
    answers: Sequence[float] | None
    versions: Mapping[str, str]


@dataclass
class Result:
    """All of one entrant's rounds."""

    name: str
    what: str
    role: Role
    setting: Setting
    tried: Sequence[Mapping[str, Any]]
    samples: list[Sample] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return median(s for sample in self.samples for s in sample.seconds)

    @property
    def cpu_s(self) -> float:
        return median(s for sample in self.samples for s in sample.cpu_s)

    @property
    def setup_s(self) -> float:
        return median(sample.setup_s for sample in self.samples)


@dataclass(frozen=True)
class Benchmark:
    """`prepare` makes the data and engines in a folder that is kept between runs, and returns the case.
    `answers` reads what a run left: a few numbers, in the order of the rows, or None for a part that leaves nothing.
    `derive` turns the results into the figures that this benchmark is about, by label.
    """

    name: str
    title: str
    prepare: Callable[[Path, argparse.Namespace], Case]
    entrants: tuple[Entrant, ...]
    answers: Callable[[Path, Case], Sequence[float] | None]
    derive: Callable[[Mapping[str, Result], Case], Mapping[str, float]]
    tolerance: float = 1e-3
    rounds: int = ROUNDS
    repeats: int = REPEATS
    tuning_repeats: int = TUNING_REPEATS
    arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None


def main(benchmark: Benchmark) -> None:
    parser = argparse.ArgumentParser(description=benchmark.title)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one setting, one round; keeps no result")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[e.name for e in benchmark.entrants])
    parser.add_argument("--rounds", type=int, default=None, help=f"default {benchmark.rounds}")
    parser.add_argument("--peers-python", default=sys.executable, metavar="PATH", help="the interpreter of the peers")
    parser.add_argument("--work", type=Path, default=WORK, metavar="DIR", help="for data and engines; kept")
    parser.add_argument("--results", type=Path, default=None, metavar="DIR")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--draw", nargs=2, type=Path, help=argparse.SUPPRESS)
    benchmark.arguments(parser)
    args = parser.parse_args()
    if args.worker:
        write_atomically(args.worker[1], json.dumps(asdict(_work(benchmark, args.worker[0]))).encode())
        return
    if args.draw:
        draw(json.loads(args.draw[0].read_text()), args.draw[1])
        return
    peers_python = str(Path(args.peers_python).absolute())  # not resolved: an environment's interpreter is a link
    work = (args.work / ("smoke" if args.smoke else "full")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    case = benchmark.prepare(work, args)
    entrants = [e for e in benchmark.entrants if not args.only or e.name in args.only]
    rounds = args.rounds or (1 if args.smoke else benchmark.rounds)
    results, not_run = compare(benchmark, entrants, case, rounds, args.smoke, peers_python, work)
    report = described(benchmark, case, results, not_run, rounds, args.smoke)
    folder = args.results or (work / "results" if args.smoke else RESULTS)
    write_atomically(folder / f"{report['name']}.json", (json.dumps(report, indent=1) + "\n").encode())
    write_atomically(folder / f"{report['name']}.md", markdown(report).encode())
    if results:  # in the peers' environment: matplotlib comes with the same extra
        files = [str((folder / f"{report['name']}.{end}").absolute()) for end in ("json", "png")]
        _script(peers_python, ["--draw", *files], subprocess.DEVNULL, ROOT).wait()
    print(markdown(report))


def compare(
    benchmark: Benchmark,
    entrants: Sequence[Entrant],
    case: Case,
    rounds: int,
    smoke: bool,
    peers_python: str,
    work: Path,
) -> tuple[dict[str, Result], dict[str, str]]:
    """Tune, then measure in rounds, every second one backwards; and why some did not run."""
    results: dict[str, Result] = {}
    not_run: dict[str, str] = {}

    def measured(entrant: Entrant, setting: Setting, repeats: int) -> Sample:
        print(f"{entrant.name} {dict(setting)}", end=" ", flush=True)
        python = peers_python if entrant.role == "peer" else sys.executable
        sample = _in_process(python, entrant.name, case, setting, repeats, SMOKE_LIMIT_S if smoke else LIMIT_S, work)
        print(f"{median(sample.seconds):.3f} s", flush=True)
        return sample

    for entrant in entrants:
        like = results.get(entrant.like or "")
        settings = entrant.settings[:1] if smoke else entrant.settings
        setting, tried = like.setting if like else settings[0], list[Mapping[str, Any]]()
        if not like and len(settings) > 1:
            for candidate in settings:
                try:
                    fastest = min(
                        measured(entrant, candidate, benchmark.tuning_repeats).seconds
                    )  # noise only ever adds
                    tried.append({"setting": candidate, "seconds": round(fastest, 4)})
                except EntrantError as error:
                    print(error, flush=True)
                    tried.append({"setting": candidate, "failed": str(error)})
            ran = [one for one in tried if "seconds" in one]
            if not ran:
                not_run[entrant.name] = str(tried[0]["failed"])
                continue
            setting = min(ran, key=lambda one: float(one["seconds"]))["setting"]
        results[entrant.name] = Result(entrant.name, entrant.what, entrant.role, setting, tried)
    for turn in range(rounds):
        for entrant in entrants if turn % 2 == 0 else list(reversed(entrants)):
            if entrant.name not in results:
                continue
            result = results[entrant.name]
            try:
                result.samples.append(measured(entrant, result.setting, 1 if smoke else benchmark.repeats))
            except EntrantError as error:
                print(error, flush=True)
                not_run[entrant.name] = str(error)
                del results[entrant.name]
    return results, not_run


class EntrantError(Exception):
    """Why an entrant's process gave no figures."""


def _in_process(
    python: str, name: str, case: Case, setting: Setting, repeats: int, limit_s: float, work: Path
) -> Sample:
    """One measurement."""
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        order, reply, log = (Path(scratch) / name for name in ("order.json", "reply.json", "log"))
        plain = {"name": name, "case": case, "setting": setting, "repeats": repeats, "spawned": time.time()}
        order.write_text(json.dumps(plain))
        with log.open("wb") as text:
            process = _script(python, ["--worker", str(order), str(reply)], text, Path(scratch))
            try:
                code = process.wait(limit_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise EntrantError(f"no result after {limit_s:.0f} s") from error
                raise
        if code or not reply.exists():
            raise EntrantError(_reason(log.read_text(errors="replace"), code))
        return Sample(**json.loads(reply.read_text()))


def _script(python: str, arguments: Sequence[str], output: Any, folder: Path) -> subprocess.Popen[bytes]:
    """The script that is running now once more, in a process group of its own."""
    return subprocess.Popen(
        [python, str(Path(sys.argv[0]).resolve()), *arguments],
        env={**os.environ, **_SILENCE, "PYTHONPATH": str(ROOT)},
        stdout=output,
        stderr=output,
        cwd=folder,
        start_new_session=True,
    )


def _reason(log: str, code: int) -> str:
    """The last line that names an error, without paths."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return re.sub(r"(/[\w.@+-]+)+", "…", (errors or lines or [""])[-1])[:200] or f"exit code {code}"


def _work(benchmark: Benchmark, order_file: Path) -> Sample:
    order = json.loads(order_file.read_text())
    case, setting = order["case"], order["setting"]
    entrant = next(e for e in benchmark.entrants if e.name == order["name"])
    seconds, cpu, answers = list[float](), list[float](), None
    with entrant.open(case, setting) as run:
        setup_s = time.time() - order["spawned"]
        for turn in range(1 + order["repeats"]):
            with tempfile.TemporaryDirectory(dir=order_file.parent) as out:
                wall_started, cpu_started = time.perf_counter(), time.process_time()
                run(Path(out))
                seconds.append(time.perf_counter() - wall_started)
                cpu.append(time.process_time() - cpu_started)
                if turn == order["repeats"] and entrant.role != "part":
                    found = benchmark.answers(Path(out), case)
                    answers = None if found is None else [float(value) for value in found]
    return Sample(setup_s, seconds[0], seconds[1:], cpu[1:], answers, _versions())


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def agreement(found: Sequence[float] | None, expected: Sequence[float] | None, tolerance: float) -> float | None:
    """The share of answers that are the same; None where there is nothing to compare."""
    if found is None or expected is None:
        return None
    if len(found) != len(expected) or not expected:
        return 0.0
    return sum(abs(a - b) <= tolerance for a, b in zip(found, expected, strict=True)) / len(expected)


def described(
    benchmark: Benchmark,
    case: Case,
    results: Mapping[str, Result],
    not_run: Mapping[str, str],
    rounds: int,
    smoke: bool,
) -> dict[str, Any]:
    """The report as JSON."""
    ours = results.get(OURS)
    entrants = []
    for result in sorted(results.values(), key=lambda one: one.seconds):
        last = result.samples[-1]
        entrants.append(
            {
                "name": result.name,
                "what": result.what,
                "role": result.role,
                "seconds": round(result.seconds, 4),
                "rows_per_s": round(case["rows"] / result.seconds, 1),
                "times_ours": round(result.seconds / ours.seconds, 3) if ours else None,
                "same_answers": agreement(last.answers, ours.samples[-1].answers, benchmark.tolerance)
                if ours
                else None,
                "cpu_s": round(result.cpu_s, 4),
                "setup_s": round(result.setup_s, 2),
                "first_run_s": round(median(sample.first_run_s for sample in result.samples), 3),
                "setting": dict(result.setting),
                "tried": list(result.tried),
                "all_seconds": [[round(s, 4) for s in sample.seconds] for sample in result.samples],
                "versions": dict(last.versions),
            }
        )
    return {
        "name": case.get("name", benchmark.name),
        "title": benchmark.title,
        "smoke": smoke,
        "rows": case["rows"],
        "facts": dict(case["facts"]),
        "rounds": rounds,
        "runs_per_round": 1 if smoke else benchmark.repeats,
        "environment": describe_environment(),
        "derived": {label: round(value, 4) for label, value in derived(benchmark, results, case).items()},
        "entrants": entrants,
        "not_run": dict(not_run),
    }


def derived(benchmark: Benchmark, results: Mapping[str, Result], case: Case) -> Mapping[str, float]:
    try:
        return benchmark.derive(results, case)
    except KeyError:  # an entrant that it needs did not run
        return {}


def markdown(report: Mapping[str, Any]) -> str:
    environment = report["environment"]
    heads = ["entrant", "role", "s", "rows/s", "time ÷ ours", "same answers", "CPU-s", "set-up, s", "setting"]
    rows = [
        [
            f"{one['name']}: {one['what']}",
            one["role"],
            f"{one['seconds']:.3f}",
            f"{one['rows_per_s']:,.0f}",
            _or_dash(one["times_ours"], ".2f"),
            _or_dash(one["same_answers"], ".1%"),
            f"{one['cpu_s']:.3f}",
            f"{one['setup_s']:.1f}",
            ", ".join(f"{name} {value}" for name, value in one["setting"].items()) or "–",
        ]
        for one in report["entrants"]
    ]
    lines = [
        f"# {report['title']}",
        "",
        *(["**A smoke run: its figures mean nothing.**", ""] if report["smoke"] else []),
        f"{report['rows']:,} rows; medians of {report['rounds']} interleaved rounds of {report['runs_per_round']} "
        "runs, warm, each round in a fresh process. Set-up (process start, imports, engine, servers) is apart. "
        f"CPU-seconds are those of the entrant's own process. {environment['cpu']}, {environment['cores']} cores, "
        f"{environment['memory_gib']} GiB, {environment['system']}, Python {environment['python']}.",
        "",
        *(f"- {name}: {value}" for name, value in report["facts"].items()),
        "",
        *(f"- **{label}: {value:.4g}**" for label, value in report["derived"].items()),
        "",
        *("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]),
        "",
        *(f"- not run: {name} ({reason})" for name, reason in report["not_run"].items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def draw(report: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entrants = list(reversed(report["entrants"]))
    colours = {"ours": "tab:green", "peer": "tab:blue", "part": "lightgrey"}
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.35 * len(entrants)), layout="constrained")
    bars = axes.barh(
        [one["name"] for one in entrants],
        [one["rows_per_s"] for one in entrants],
        color=[colours[one["role"]] for one in entrants],
    )
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=9)
    axes.margins(x=0.12)
    axes.set(xlabel="rows/s (grey: one stage alone)", title=report["title"])
    figure.savefig(path, dpi=150, metadata={"Software": None})
