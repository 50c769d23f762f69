"""A container's quotas, in trees of control groups as systems have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.host.cores import cpu_quota, default_threads, free_bytes, usable_cores

V2 = "29 23 0:26 {top} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = (
    "30 23 0:27 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "31 23 0:28 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 23 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
)
V1_GROUPS = "4:memory:{path}\n3:cpuset:/else\n2:cpu,cpuacct:{path}\n0::/"
MIB = 2**20


def tree(root: Path, group: str, mounts: str, files: dict[str, str]) -> Path:
    mounts = f"22 27 0:21 / /proc rw - proc proc rw\n{mounts}"
    for name, text in {"proc/self/cgroup": group, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("group", "mounts", "files", "quota"),
    [
        ("0::/", V2.format(top="/"), {"": "max 100000"}, None),
        ("0::/", V2.format(top="/"), {"": "150000 100000"}, 2),
        ("0::/", V2.format(top="/"), {"": "10000 100000"}, 1),
        ("0::/a/b", V2.format(top="/"), {"a/b": "800000 100000", "a": "300000 100000", "": "max 100000"}, 3),
        ("0::/a/b", V2.format(top="/"), {"a/b": "max 100000", "a": "max 100000"}, None),
        ("0::/a/b", V2.format(top="/a"), {"b": "200000 100000", "a/b": "100000 100000"}, 2),
        ("0::/../other", V2.format(top="/"), {"": "400000 100000"}, 4),  # of another namespace
        ("0::/pod/x", V2.format(top="/else"), {"": "500000 100000"}, 5),
        ("1:name=systemd:/\n0::/", "24 27 0:6 / /dev rw - tmpfs tmpfs rw", {"": "100000 100000"}, None),  # not mounted
    ],
)
def test_the_tightest_quota_of_the_group_and_those_around_it_counts(
    tmp_path: Path, group: str, mounts: str, files: dict[str, str], quota: int | None
) -> None:
    written = {f"sys/fs/cgroup/{folder}/cpu.max": text for folder, text in files.items()}
    root = tree(tmp_path, group, mounts, written)
    affinity = len(os.sched_getaffinity(0))
    assert cpu_quota(root) == quota and usable_cores(root) == min(affinity, quota or affinity)


@pytest.mark.parametrize(("quota", "expected"), [("-1", None), ("250000", 3)])
@pytest.mark.parametrize("top", ["/", "/docker/id"])  # a container's own part is all that it sees mounted
def test_version_1_has_quotas_and_limits_too(tmp_path: Path, quota: str, expected: int | None, top: str) -> None:
    own = "docker/id/" if top == "/" else ""
    files = {
        f"sys/fs/cgroup/cpu,cpuacct/{own}cpu.cfs_quota_us": quota,
        f"sys/fs/cgroup/cpu,cpuacct/{own}cpu.cfs_period_us": "100000",
        "proc/meminfo": "MemAvailable: 65536 kB",
        f"sys/fs/cgroup/memory/{own}memory.limit_in_bytes": str(9 * MIB),
        f"sys/fs/cgroup/memory/{own}memory.usage_in_bytes": str(2 * MIB),
    }
    root = tree(tmp_path, V1_GROUPS.format(path="/docker/id"), V1.format(top=top), files)
    assert (cpu_quota(root), free_bytes(root)) == (expected, 7 * MIB)


def test_the_tightest_memory_limit_counts_and_no_system_is_needed(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 65536 kB"}
    root = tree(tmp_path, "0::/a/b", V2.format(top="/"), files)
    assert (free_bytes(root), free_bytes(root / "none"), cpu_quota(root / "none")) == (64 * MIB, None, None)
    limits = {"a/b": ("max", 1), "a": (str(40 * MIB), 30 * MIB), "": (str(50 * MIB), 35 * MIB)}
    for folder, (limit, used) in limits.items():
        for name, value in (("max", limit), ("current", str(used))):
            (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
            (root / "sys/fs/cgroup" / folder / f"memory.{name}").write_text(f"{value}\n")
    assert free_bytes(root) == 10 * MIB
    (root / "sys/fs/cgroup/a/memory.current").write_text(str(41 * MIB))
    assert free_bytes(root) == 0


def test_threads_are_as_many_as_the_quota_unless_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, "0::/", V2.format(top="/"), {"sys/fs/cgroup/cpu.max": "100000 100000"})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_threads(root) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_threads(root) == 3
