"""Kill runs at random for some minutes and count what was lost: `python soak.py --minutes 10 --seed 3`."""

import argparse
import sys
import tempfile
from pathlib import Path

from crashes import Tally, make_home, soak


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--minutes", type=float, default=10.0)
    arguments.add_argument("--seed", type=int, default=0)
    asked = arguments.parse_args()

    def told(tally: Tally) -> None:
        line = f"{tally.runs} runs, {tally.kills} kills, lost {tally.lost}, duplicated {tally.duplicated}"
        print(f"{line}, wrong {tally.wrong}, recomputed {tally.recomputed} batches", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        unscored = make_home(Path(folder) / "unscored")
        undisturbed = unscored.copy(Path(folder) / "undisturbed")
        undisturbed.materialize()
        tally = soak(unscored, undisturbed.day(), Path(folder), seed=asked.seed, minutes=asked.minutes, told=told)
    print(
        f"\nseed {asked.seed}: {tally.runs} runs, {tally.kills} kills ({dict(tally.by_kind)}), {tally.days} days\n"
        f"rows lost {tally.lost}, duplicated {tally.duplicated}; days wrong {tally.wrong}\n"
        f"batches recomputed {tally.recomputed}, at most {tally.most_recomputed} for each kill"
    )
    return 1 if tally.lost or tally.duplicated or tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
