"""How many cores a process may use: its affinity mask and the quotas of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_runtime.device.host import usable_cores

V1 = {"proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"}
POD = {"proc/self/cgroup": "0::/kubepods/pod/main\n"}


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "3200000 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "no quota\n"}, 16),
        ({**POD, "sys/fs/cgroup/kubepods/pod/main/cpu.max": "300000 100000\n"}, 3),
        ({**POD, "sys/fs/cgroup/kubepods/pod/main/cpu.max": "max 100000\n"}, 16),
        (
            {
                **POD,
                "sys/fs/cgroup/kubepods/pod/main/cpu.max": "max 100000\n",
                "sys/fs/cgroup/kubepods/cpu.max": "600000 100000\n",
            },
            6,
        ),
        (
            {
                **POD,
                "sys/fs/cgroup/kubepods/pod/main/cpu.max": "700000 100000\n",
                "sys/fs/cgroup/kubepods/pod/cpu.max": "500000 100000\n",
            },
            5,
        ),
        ({**POD, "sys/fs/cgroup/kubepods/other/cpu.max": "100000 100000\n"}, 16),
        ({**POD, "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/../../other\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "350000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000\n",
            },
            2,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
    ],
    ids=[
        "no control groups",
        "v2, group unknown",
        "v2",
        "v2 without a limit",
        "v2, more than there are",
        "a fraction above",
        "less than one core",
        "unreadable",
        "its own group",
        "its own group without a limit",
        "a group above",
        "the tightest of two",
        "another group",
        "a name from outside the container",
        "a group outside the namespace",
        "v1",
        "v1, a name from outside the container",
        "v1 without a limit",
    ],
)
def test_the_tightest_quota_counts(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


def test_the_affinity_mask_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert usable_cores(tmp_path) == 3
