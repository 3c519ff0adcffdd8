"""Named points at which a test may end the process, and how it gets there.

A fault plan is passed in, like any other object; nothing looks for one. Left out, it is a function that does
nothing, called a few times a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

POINTS = ("read", "decode", "enqueue", "write", "data file", "receipt", "quarantine", "commit", "clean-up")
"""What a scoring run does, in the order in which it is first done."""

FaultPlan = Callable[[str], None]
"""Called with `before <point>` and `after <point>`, on the thread that does it."""


def no_faults(point: str) -> None:
    """The fault plan of every run outside the tests."""


@contextmanager
def around(faults: FaultPlan, point: str) -> Iterator[None]:
    """Tell the plan before the block, and after it if it did not fail."""
    faults(f"before {point}")
    yield
    faults(f"after {point}")
