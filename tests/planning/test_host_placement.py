"""Where the servers of a comparison run on one host: its cores, and a container's quotas of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.host.cores import cpu_quota, default_threads, format_cores, free_bytes, parse_cores, share_of, usable_cores
from tandem.host.devices import Devices
from tandem.workshops.planning.host_placement import (
    CoreGroup,
    HostPlacement,
    place_on_cpus,
    place_on_gpus,
    place_on_neuron,
)
from tandem.workshops.planning.plan import PlanConfig
from tests.planning.support import model

TRN1 = Devices(count=1, instance="trn1.2xlarge", family="trn1", cores=2, lnc=1)
TRN2 = Devices(count=16, instance="trn2.48xlarge", family="trn2", cores=64, lnc=2)
ONE_CHIP = Devices(count=1, instance="trn2.48xlarge", family="trn2", cores=4, lnc=2)  # a claim on one device


def config(target: str, draft: str | None, **settings: object) -> PlanConfig:
    return PlanConfig("found", model(target), draft and model(draft), **settings)  # type: ignore[arg-type]


def test_cpus_are_divided_and_all_used() -> None:
    placement = place_on_cpus((0, 1, 2, 3), None, 1)
    assert placement == HostPlacement(CoreGroup("0-3"), CoreGroup("0-2"), CoreGroup("3"))
    assert place_on_cpus((0, 1), None, 2) == HostPlacement(CoreGroup("0,1", 2), CoreGroup("0"), CoreGroup("1"))
    assert place_on_cpus(tuple(range(8)), (6, 7), 4).target == CoreGroup("0-5", 2)


def test_gpus_go_one_to_a_process() -> None:
    assert place_on_gpus((0, 1), None, 2) == HostPlacement(CoreGroup("0,1", 2), CoreGroup("0"), CoreGroup("1"))
    with pytest.raises(ValueError, match="cores: tp_degree 1 uses as many, and 2 are named"):
        place_on_gpus((0, 1), None, 1)


def test_the_first_seeds_pair_fits_its_instance_fused_and_apart_with_the_draft_on_the_host() -> None:
    """The target needs both cores of a trn1.2xlarge, so the seed's draft ran on another machine."""
    pair = config("Llama-3.1-8B", "Llama-3.2-1B", backend="nxdi", batch=2, length=128, drafts=4, degree=2)
    with pytest.raises(ValueError, match="cores: distributed does not fit on 2 cores; --role plan says what does"):
        place_on_neuron(pair, TRN1, None, None)
    both = CoreGroup("0,1", 2)
    assert place_on_neuron(pair, TRN1, None, None, apart=False) == HostPlacement(both, both, None)


def test_the_plan_says_how_wide_each_server_is() -> None:
    pair = config("Llama-3.1-8B", "Llama-3.2-1B", batch=4, length=4096, drafts=4)
    placed = place_on_neuron(pair, ONE_CHIP, None, None)
    assert placed.draft is not None
    sets = [set(parse_cores(group.cores)) for group in (placed.whole, placed.target, placed.draft)]
    assert sets[1] | sets[2] <= sets[0] and not sets[1] & sets[2]
    assert [len(cores) for cores in sets] == [placed.whole.degree, placed.target.degree, placed.draft.degree]
    named = place_on_neuron(pair, TRN2, parse_cores("8-15"), parse_cores("12-13"))
    assert named == HostPlacement(CoreGroup("8-15", 8), CoreGroup("8-11", 4), CoreGroup("12,13", 2))


def test_lookup_takes_no_core_of_a_device() -> None:
    placed = place_on_neuron(config("Llama-3.1-8B", None), TRN2, parse_cores("0-3"), None)
    assert placed.draft is None and placed.target == placed.whole == CoreGroup("0-3", 4)
    assert "on the host's CPU" in str(placed)


def test_what_cannot_be_placed_is_one_line() -> None:
    pair = config("Llama-3.1-8B", "Llama-3.2-1B", batch=4, length=4096)
    with pytest.raises(ValueError, match=r"device: no Neuron device is found here; compare servers .* --connect"):
        place_on_neuron(pair, Devices(), None, None)
    with pytest.raises(ValueError, match=r"cores: 128 are more than the 64 that a trn2.48xlarge has at LNC 2"):
        place_on_neuron(pair, TRN2, tuple(range(128)), None)
    with pytest.raises(ValueError, match="cores: distributed does not fit on 1 cores"):
        place_on_neuron(pair, TRN2, (0,), None)
    with pytest.raises(ValueError, match="draft-cores: 9 must be among --cores 0-7, or fused decoding would have"):
        place_on_cpus(tuple(range(8)), (9,), 1)
    with pytest.raises(ValueError, match="cores: a target and a draft apart need at least two"):
        place_on_cpus((0,), None, 1)
    with pytest.raises(ValueError, match="cores: 3 of them cannot be divided among 2 ranks"):
        place_on_cpus((0, 1, 2), None, 2)


@pytest.mark.parametrize(
    ("text", "cores", "written"),
    [("0", (0,), "0"), ("0-3", (0, 1, 2, 3), "0-3"), ("0-1,8", (0, 1, 8), "0,1,8"), ("5,4", (5, 4), "5,4")],
)
def test_a_list_is_read_and_written(text: str, cores: tuple[int, ...], written: str) -> None:
    assert parse_cores(text) == cores and format_cores(cores) == written
    assert parse_cores(written) == cores


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is not a list of cores"),
        ("a", "'a' is not a list of cores"),
        ("1-", "'1-' is not a list of cores"),
        ("3-1", "3-1 is not a range of cores"),
        ("0-9999999", "0-9999999 is not a range of cores"),
        ("0-2,1", "a core of '0-2,1' is named twice"),
    ],
)
def test_what_is_no_list_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^draft-cores: {why}"):
        parse_cores(text, "draft-cores")


def test_ranks_get_equal_shares() -> None:
    assert [share_of((4, 5, 6, 7), rank, 2) for rank in range(2)] == [(4, 5), (6, 7)]
    with pytest.raises(ValueError, match="cores: 3 of them cannot be divided among 2 ranks"):
        share_of((0, 1, 2), 0, 2)


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
