import dataclasses
import json
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from autoplace import accelerators, cgroups, machine
from autoplace.accelerators import Accelerator
from autoplace.machine import Machine, detect_machine

FOUR_CPUS = (0, 1, 2, 3)
GIB = 1024**3

V2_MOUNT = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate"
V1_CPU_MOUNT = "36 24 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY_MOUNT = "37 24 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
HYBRID_V2_MOUNT = "38 24 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


class Tree:
    """A /proc and a /sys in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.proc.mkdir()
        self.sys.mkdir()

    def write(self, path: str, text: str) -> None:
        """``path`` starts with /proc or /sys."""
        file = self.proc.parent / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")

    def describe(self, *, mounts=(), groups=()) -> None:
        self.write("/proc/self/mountinfo", "\n".join(mounts))
        self.write("/proc/self/cgroup", "\n".join(groups))

    def v2(self, group: str, mount_root: str = "/") -> None:
        mount = V2_MOUNT.replace(" / ", f" {mount_root} ", 1)
        self.describe(mounts=[mount], groups=[f"0::{group}"])

    def detect(self, affinity=FOUR_CPUS) -> Machine:
        return detect_machine(
            accelerators=False, affinity=affinity, proc_root=self.proc, sys_root=self.sys
        )


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# --------------------------------------------------------------------------------------------------
# Quotas

QUOTAS = [  # microseconds of each 100000, CPUs' worth, usable of four
    (50_000, 0.5, 1),
    (100_000, 1.0, 1),
    (150_000, 1.5, 1),
    (199_999, 1.99999, 1),
    (200_000, 2.0, 2),
    (250_000, 2.5, 2),
    (800_000, 8.0, 4),
    (None, None, 4),
]


@pytest.mark.parametrize(("quota_us", "cpus", "usable"), QUOTAS)
def test_a_version_2_quota_bounds_the_usable_cpus(tree, quota_us, cpus, usable):
    tree.v2("/job")
    limit = "max" if quota_us is None else quota_us
    tree.write("/sys/fs/cgroup/job/cpu.max", f"{limit} 100000")
    found = tree.detect()
    assert (found.cpu_quota, found.usable_cpus) == (cpus, usable)
    assert found.logical_cpus == 4


@pytest.mark.parametrize(("quota_us", "cpus", "usable"), QUOTAS)
def test_a_version_1_quota_bounds_the_usable_cpus(tree, quota_us, cpus, usable):
    tree.describe(mounts=[V1_CPU_MOUNT], groups=["4:cpu,cpuacct:/job"])
    limit = -1 if quota_us is None else quota_us
    tree.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", str(limit))
    tree.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    found = tree.detect()
    assert (found.cpu_quota, found.usable_cpus) == (cpus, usable)


@pytest.mark.parametrize(
    ("outer", "middle", "own", "cpus"),
    [
        ("max 100000", "150000 100000", "max 100000", 1.5),
        ("300000 100000", "max 100000", "200000 100000", 2.0),
        ("100000 100000", "200000 100000", "400000 100000", 1.0),
        ("max 100000", "max 100000", "25000 10000", 2.5),
    ],
)
def test_the_tightest_of_nested_groups_holds(tree, outer, middle, own, cpus):
    tree.v2("/a/b/c")
    for group, text in (("a", outer), ("a/b", middle), ("a/b/c", own)):
        tree.write(f"/sys/fs/cgroup/{group}/cpu.max", text)
    tree.write("/sys/fs/cgroup/other/cpu.max", "1000 100000")
    assert tree.detect().cpu_quota == cpus


def test_the_tightest_of_nested_version_1_groups_holds(tree):
    tree.describe(mounts=[V1_CPU_MOUNT], groups=["4:cpuacct,cpu:/a/b"])
    for group, quota in (("", -1), ("a/", 150_000), ("a/b/", 400_000)):
        tree.write(f"/sys/fs/cgroup/cpu,cpuacct/{group}cpu.cfs_quota_us", str(quota))
        tree.write(f"/sys/fs/cgroup/cpu,cpuacct/{group}cpu.cfs_period_us", "100000")
    assert tree.detect().cpu_quota == 1.5


def test_a_hybrid_machine_has_its_quota_in_version_1(tree):
    tree.describe(
        mounts=[V1_CPU_MOUNT, HYBRID_V2_MOUNT], groups=["4:cpu,cpuacct:/job", "0::/session"]
    )
    tree.write("/sys/fs/cgroup/unified/session/cgroup.procs", "1")
    tree.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "200000")
    tree.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    assert tree.detect().cpu_quota == 2.0


@pytest.mark.parametrize(
    ("group", "mount_root"),
    [
        ("/docker/0123abcd", "/"),  # the host's path, of which the container sees nothing
        ("/", "/"),  # its own namespace
        ("/docker/0123abcd", "/docker/0123abcd"),  # only its own group is mounted
        ("/../../system.slice", "/"),  # moved out of its namespace
        ("/", "/../../.."),  # mounted before it got a namespace
    ],
)
def test_a_container_that_sees_only_its_own_group_finds_the_quota_at_the_mount(
    tree, group, mount_root
):
    tree.v2(group, mount_root)
    tree.write("/sys/fs/cgroup/cpu.max", "150000 100000")
    assert tree.detect().cpu_quota == 1.5


def test_groups_below_a_mounted_subtree_are_found(tree):
    tree.v2("/docker/box/inner", mount_root="/docker/box")
    tree.write("/sys/fs/cgroup/cpu.max", "max 100000")
    tree.write("/sys/fs/cgroup/inner/cpu.max", "50000 100000")
    assert tree.detect().cpu_quota == 0.5


@pytest.mark.parametrize("version", [1, 2])
def test_the_usual_mount_points_are_tried_where_the_mounts_cannot_be_read(tree, version):
    if version == 2:
        tree.write("/sys/fs/cgroup/cgroup.controllers", "cpu memory")
        tree.write("/sys/fs/cgroup/cpu.max", "250000 100000")
    else:
        tree.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000")
    assert tree.detect().cpu_quota == 2.5


@pytest.mark.parametrize("text", ["", "max", "garbage here", "0 100000", "-1 100000", "100000 0"])
def test_a_quota_that_makes_no_sense_is_none(tree, text):
    tree.v2("/job")
    tree.write("/sys/fs/cgroup/job/cpu.max", text)
    assert tree.detect().cpu_quota is None


def test_the_time_that_a_quota_took_is_read_from_either_version(tree):
    assert cgroups.throttled_s(proc_root=tree.proc, sys_root=tree.sys) == 0.0
    tree.v2("/job")
    stat = "/sys/fs/cgroup/job/cpu.stat"
    tree.write(stat, "usage_usec 9\nnr_throttled 3\nthrottled_usec 1500000")
    assert cgroups.throttled_s(proc_root=tree.proc, sys_root=tree.sys) == 1.5
    tree.write(stat, "nr_throttled 3\nthrottled_time 2500000000")
    assert cgroups.throttled_s(proc_root=tree.proc, sys_root=tree.sys) == 2.5


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"),
    [((5,), "300000 100000", 1), ((2, 7), "300000 100000", 2), (FOUR_CPUS, "300000 100000", 3)],
)
def test_the_smaller_of_affinity_and_quota_holds(tree, affinity, quota, usable):
    tree.v2("/job")
    tree.write("/sys/fs/cgroup/job/cpu.max", quota)
    found = tree.detect(affinity)
    assert found.usable_cpus == usable
    assert found.logical_cpus == len(affinity)


def test_a_mount_point_with_a_space_is_read(tree, tmp_path):
    mount = tmp_path / "control groups"
    mount.mkdir()
    (mount / "cpu.max").write_text("200000 100000\n")
    where = str(mount).replace(" ", r"\040")
    tree.describe(mounts=[f"35 24 0:30 / {where} rw - cgroup2 cgroup rw"], groups=["0::/"])
    assert tree.detect().cpu_quota == 2.0


# --------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (2 * GIB, 2 * GIB),
        (64 * GIB, 16 * GIB),
        ("max", 16 * GIB),
        (9223372036854771712, 16 * GIB),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_that_of_the_machine_within_the_limit(tree, version, limit, expected):
    tree.write("/proc/meminfo", f"MemTotal:       {16 * GIB // 1024} kB\nMemFree: 1 kB")
    if version == 2:
        tree.v2("/job")
        tree.write("/sys/fs/cgroup/job/memory.max", str(limit))
    else:
        tree.describe(mounts=[V1_MEMORY_MOUNT], groups=["9:memory:/job"])
        tree.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(limit))
    assert tree.detect().memory_bytes == expected


@pytest.mark.parametrize("version", [1, 2])
def test_memory_that_is_left_is_the_limit_without_what_is_used_but_for_idle_file_pages(
    tree, version
):
    if version == 2:
        tree.describe(mounts=[V2_MOUNT], groups=["0::/job"])
        names, folder = ("memory.max", "memory.current", "inactive_file"), "/sys/fs/cgroup/job"
    else:
        tree.describe(mounts=[V1_MEMORY_MOUNT], groups=["9:memory:/job"])
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        folder = "/sys/fs/cgroup/memory/job"
    for name, content in zip(names, (8 * GIB, 6 * GIB, None), strict=True):
        if content is not None:
            tree.write(f"{folder}/{name}", str(content))
    tree.write(f"{folder}/memory.stat", f"anon 1\n{names[2]} {GIB}\nactive_file 7\n")
    assert cgroups.memory_left_bytes(proc_root=tree.proc, sys_root=tree.sys) == 3 * GIB


def test_memory_without_a_limit_has_nothing_left_to_say(tree):
    tree.describe(mounts=[V2_MOUNT], groups=["0::/job"])
    tree.write("/sys/fs/cgroup/job/memory.max", "max")
    tree.write("/sys/fs/cgroup/job/memory.current", str(GIB))
    assert cgroups.memory_left_bytes(proc_root=tree.proc, sys_root=tree.sys) is None


def test_the_tightest_memory_limit_of_nested_groups_holds(tree):
    tree.v2("/a/b")
    tree.write("/sys/fs/cgroup/a/memory.max", str(3 * GIB))
    tree.write("/sys/fs/cgroup/a/b/memory.max", str(8 * GIB))
    assert cgroups.memory_limit_bytes(proc_root=tree.proc, sys_root=tree.sys) == 3 * GIB


# --------------------------------------------------------------------------------------------------
# Cores and models


@pytest.mark.parametrize(
    ("affinity", "cores"), [((0, 1, 2, 3), 2), ((0, 1), 2), ((0, 2), 1), ((3,), 1)]
)
def test_physical_cores_are_those_of_the_affinity_mask(tree, affinity, cores):
    for cpu in range(4):  # two cores of two hardware threads: 0 with 2, 1 with 3
        folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        tree.write(f"{folder}/core_cpus_list", f"{cpu % 2},{cpu % 2 + 2}")
    found = tree.detect(affinity)
    assert found.physical_cores == cores
    assert found.usable_cpus == len(affinity)


def test_equal_core_ids_in_two_packages_are_two_cores(tree):
    for cpu in range(4):
        folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        tree.write(f"{folder}/physical_package_id", str(cpu // 2))
        tree.write(f"{folder}/core_id", str(cpu % 2))
    assert tree.detect().physical_cores == 4


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        (
            "processor\t: 0\nmodel name\t: AMD EPYC  9B14\n\nmodel name\t: AMD EPYC  9B14",
            "AMD EPYC 9B14",
        ),
        (
            "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c",
            "ARM implementer 0x41 part 0xd0c",
        ),
        (
            "CPU implementer: 0x41\nCPU part: 0xd05\nCPU implementer: 0x41\nCPU part: 0xd0b",
            "ARM implementer 0x41 part 0xd05 + ARM implementer 0x41 part 0xd0b",
        ),
        ("cpu\t\t: POWER9, altivec supported", "POWER9, altivec supported"),
    ],
)
def test_the_cpu_model_is_read_from_cpuinfo(tree, cpuinfo, model):
    tree.write("/proc/cpuinfo", cpuinfo)
    assert tree.detect().cpu_model == model


def test_a_system_without_proc_and_sys_is_described_all_the_same(tmp_path):
    nowhere = tmp_path / "none"
    found = detect_machine(accelerators=False, proc_root=nowhere, sys_root=nowhere)
    assert found.cpu_quota is None
    assert 1 <= found.physical_cores <= found.logical_cpus == found.usable_cpus
    assert found.memory_bytes > 2**20
    assert found.cpu_model


# --------------------------------------------------------------------------------------------------
# Fingerprints, JSON


def test_describing_the_cpu_alone_imports_no_torch():
    code = (
        "import sys; from autoplace.machine import detect_machine; "
        "print(detect_machine(accelerators=False).host_fingerprint, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    fingerprint, imported = done.stdout.split()
    assert imported == "False"
    assert fingerprint == detect_machine(probe=lambda device: "").host_fingerprint


GPU = Accelerator(device="cuda:0", name="Card", uuid="0a1b", memory_bytes=8 * GIB, usable=True)
SAMPLE = Machine(
    usable_cpus=2,
    logical_cpus=4,
    physical_cores=2,
    cpu_quota=2.5,
    cpu_model="Some CPU",
    memory_bytes=16 * GIB,
    platform="linux",
    arch="x86_64",
    accelerators=(GPU,),
    versions=(("blas", "mkl"), ("driver", "550.54"), ("python", "3.11.7"), ("torch", "2.8.0")),
    variables=(("OMP_NUM_THREADS", "2"),),
)


def with_version(name: str, value: str) -> dict[str, object]:
    return {"versions": tuple(sorted({**dict(SAMPLE.versions), name: value}.items()))}


@pytest.mark.parametrize(
    "change",
    [
        {"usable_cpus": 1},
        {"logical_cpus": 2},
        {"physical_cores": 4},
        {"cpu_quota": None},
        {"cpu_quota": 2.0},
        {"cpu_model": "Another CPU"},
        {"arch": "arm64"},
        {"platform": "darwin"},
        {"variables": ()},
        {"memory_bytes": 8 * GIB},
        {"cpu_power": "powersave"},
        {"variables": (("MKL_NUM_THREADS", "2"), ("OMP_NUM_THREADS", "2"))},
        with_version("torch", "2.9.0"),
        with_version("numpy", "2.0.0"),
        with_version("python", "3.12.0"),
    ],
)
def test_what_cpu_timings_depend_on_changes_both_fingerprints(change):
    changed = dataclasses.replace(SAMPLE, **change)
    assert changed.host_fingerprint != SAMPLE.host_fingerprint
    assert changed.fingerprint != SAMPLE.fingerprint
    assert changed.changes_since(SAMPLE)


@pytest.mark.parametrize(
    "change",
    [
        {"accelerators": ()},
        {"accelerators": (dataclasses.replace(GPU, uuid="ffff"),)},
        {"accelerators": (dataclasses.replace(GPU, device="cuda:1"),)},
        {"accelerators": (dataclasses.replace(GPU, usable=False, reason="broken"),)},
        with_version("driver", "560.1"),
        with_version("blas", "openblas"),
    ],
)
def test_what_only_devices_and_blas_depend_on_leaves_the_host_fingerprint(change):
    changed = dataclasses.replace(SAMPLE, **change)
    assert changed.host_fingerprint == SAMPLE.host_fingerprint
    assert changed.fingerprint != SAMPLE.fingerprint
    assert changed.changes_since(SAMPLE)
    assert not dataclasses.replace(changed, complete=False).changes_since(SAMPLE)


@pytest.mark.parametrize(
    "change",
    [
        {"memory_bytes": 16 * GIB - 4096},
        with_version("python", "3.11.9"),
        with_version("scikit-learn", "1.9"),
    ],
)
def test_what_no_timing_depends_on_changes_no_fingerprint(change):
    changed = dataclasses.replace(SAMPLE, **change)
    assert changed.fingerprint == SAMPLE.fingerprint
    assert changed.changes_since(SAMPLE) == ()


def test_a_change_is_named_with_both_values():
    changed = dataclasses.replace(SAMPLE, cpu_quota=None, variables=())
    assert changed.changes_since(SAMPLE) == (
        "CPU quota: was 2.5, now none",
        "CPU variables: was OMP_NUM_THREADS=2, now not set",
    )


def test_json_has_the_documented_keys_and_comes_back_equal():
    data = json.loads(json.dumps(SAMPLE.to_json()))
    assert {
        "usable_cpus",
        "physical_cores",
        "cpu_quota",
        "cpu_model",
        "memory_bytes",
        "accelerators",
        "versions",
        "fingerprint",
    } <= set(data)
    assert set(data["accelerators"][0]) == {
        "device",
        "name",
        "uuid",
        "memory_bytes",
        "usable",
        "reason",
        "compute_units",
        "power",
    }
    assert data["versions"]["torch"] == "2.8.0"
    assert Machine.from_json(data) == SAMPLE
    assert hash(Machine.from_json(data)) == hash(SAMPLE)


def test_power_of_the_cpu_is_governor_boost_and_battery(tree, monkeypatch):
    assert tree.detect().cpu_power in ("", "on battery")  # of the machine that tests
    cpu = "/sys/devices/system/cpu"
    tree.write(f"{cpu}/cpu0/cpufreq/scaling_governor", "powersave\n")
    tree.write(f"{cpu}/cpu0/cpufreq/energy_performance_preference", "balance_power\n")
    tree.write(f"{cpu}/intel_pstate/no_turbo", "1\n")
    battery = types.SimpleNamespace(power_plugged=False)
    monkeypatch.setattr("psutil.sensors_battery", lambda: battery, raising=False)
    assert tree.detect().cpu_power == "powersave, balance_power, without boost, on battery"
    battery.power_plugged = None  # the system does not know
    tree.write(f"{cpu}/intel_pstate/no_turbo", "0\n")
    assert tree.detect().cpu_power == "powersave, balance_power"


@pytest.mark.parametrize(
    ("output", "limits"),
    [
        ("GPU-aa, 700.00 W\nGPU-bb, 350.00 W", ("700.00 W", "350.00 W", "")),
        ("GPU-cc, 300.00 W", ("300.00 W",) * 3),  # slices of one card
        ("", ("",) * 3),
    ],
)
def test_power_limits_are_those_of_the_drivers_tool(monkeypatch, output, limits):
    monkeypatch.setattr(machine, "_output_of", lambda *command: output)
    cards = tuple(dataclasses.replace(GPU, uuid=uuid) for uuid in ("aa", "GPU-bb", "MIG-dd"))
    assert tuple(card.power for card in machine._with_power_limits(cards)) == limits


def test_the_key_is_a_plain_file_name_and_ignores_what_may_change():
    assert SAMPLE.key == dataclasses.replace(SAMPLE, usable_cpus=1, variables=(), versions=()).key
    odd = dataclasses.replace(SAMPLE, cpu_model="处理器 / ..\\ CON: 1")
    assert odd.key != dataclasses.replace(odd, cpu_model="其他 / ..\\ CON: 1").key
    assert odd.key.replace("-", "").isalnum() and odd.key.isascii()


def test_thread_variables_that_are_set_are_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    variables = dict(detect_machine(accelerators=False).variables)
    assert variables["OMP_NUM_THREADS"] == "3"
    assert "MKL_NUM_THREADS" not in variables


def test_the_real_machine_knows_its_torch_and_blas():
    found = detect_machine(probe=lambda device: "")
    versions = dict(found.versions)
    assert {"python", "torch", "numpy", "blas"} <= set(versions)
    assert found.complete


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC 12",
    ],
)
def test_the_driver_version_is_read_where_the_driver_writes_it(tree, text):
    tree.write("/proc/driver/nvidia/version", text)
    assert machine._driver_version(tree.proc) == {"driver": "550.54.15"}


# --------------------------------------------------------------------------------------------------
# Accelerators


def pretend(monkeypatch, *names: str, **properties: object) -> None:
    """Make torch report devices that are not there."""
    import torch

    from autoplace import device

    module = types.SimpleNamespace(
        get_device_properties=lambda device: types.SimpleNamespace(**properties),
        get_device_capability=lambda device: (3, 5),
        get_arch_list=lambda: ["sm_50", "sm_90"],
    )
    monkeypatch.setattr(device, "accelerator_devices", lambda: names)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)


def test_a_machine_without_accelerators_has_none(monkeypatch):
    pretend(monkeypatch)
    assert detect_machine().accelerators == ()


def test_an_accelerator_is_known_by_name_uuid_and_memory(monkeypatch):
    pretend(monkeypatch, "cuda:0", name="Card", uuid="0a1b", total_memory=8 * GIB)
    assert detect_machine(probe=lambda device: "").accelerators == (GPU,)


@pytest.mark.parametrize(
    ("properties", "uuid"),
    [
        ({"name": "Card", "uuid": b"\x0a\x1b", "total_memory": 1}, "0a1b"),
        (
            {
                "name": "Card",
                "pci_domain_id": 0,
                "pci_bus_id": 65,
                "pci_device_id": 2,
                "total_memory": 1,
            },
            "cuda-Card-pci-0-65-2",
        ),
        ({"name": "Card", "total_memory": 1}, "cuda-Card-1"),
        ({}, "cuda-cuda device-1"),
    ],
)
def test_an_accelerator_without_a_uuid_still_has_a_stable_identity(monkeypatch, properties, uuid):
    pretend(monkeypatch, "cuda:1", **properties)
    (found,) = accelerators.detect_accelerators(probe=lambda device: "")
    assert found.uuid == uuid


def test_an_accelerator_that_fails_its_check_is_unusable_with_the_reason(monkeypatch):
    pretend(monkeypatch, "cuda:0", "cuda:1", name="Card", uuid="0a1b", total_memory=8 * GIB)
    reasons = {"cuda:0": "", "cuda:1": "it is on fire"}
    good, bad = detect_machine(probe=reasons.__getitem__).accelerators
    assert (good.usable, good.reason) == (True, None)
    assert (bad.usable, bad.reason, bad.name) == (False, "it is on fire", "Card")


def test_a_device_that_torch_cannot_use_is_unusable_with_the_errors_last_line(monkeypatch):
    from autoplace import device

    # A type that this torch knows by name and has no driver for; the real check, in a real child.
    monkeypatch.setattr(device, "accelerator_devices", lambda: ("mtia:0",))
    (found,) = accelerators.detect_accelerators()
    assert not found.usable
    assert found.reason and "\n" not in found.reason
    assert "Traceback" not in found.reason
    assert found.uuid == "mtia-unknown-0"


HANG = "import time; {described}time.sleep(60)"
DESCRIBED = (
    'print(\'autoplace-probe {"name": "Card", "uuid": "0a1b", "memory_bytes": 8}\', flush=True); '
)


@pytest.mark.parametrize(
    ("described", "name"), [("", "cuda device"), (DESCRIBED, "Card")], ids=["at once", "later"]
)
def test_a_device_that_hangs_is_unusable_after_the_deadline(monkeypatch, described, name):
    pretend(monkeypatch, "cuda:0", "cuda:1")
    command = [sys.executable, "-c", HANG.format(described=described)]
    monkeypatch.setattr(accelerators, "_child_command", lambda device: command)
    started = time.monotonic()
    found = detect_machine(deadline_s=1.0).accelerators
    assert time.monotonic() - started < 10
    assert [card.usable for card in found] == [False, False]
    assert found[0].reason == "a small kernel on it was not done within the deadline of 1 s"
    assert found[0].name == name


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(3)", "checking it ended with exit status 3"),
        ("raise RuntimeError('first\\n  the driver is too old\\n')", "the driver is too old"),
        ("print('autoplace-probe {\"nam', end='')", "checking it ended with exit status 0"),
    ],
)
def test_a_check_that_crashes_says_how(monkeypatch, code, reason):
    pretend(monkeypatch, "cuda:0")
    monkeypatch.setattr(accelerators, "_child_command", lambda device: [sys.executable, "-c", code])
    (found,) = accelerators.detect_accelerators()
    assert (found.usable, found.reason) == (False, reason)


def test_a_missing_kernel_image_names_what_torch_was_built_for(monkeypatch):
    pretend(monkeypatch, "cuda:0")
    error = RuntimeError(
        "CUDA error: no kernel image is available for execution on the device\n"
        "CUDA kernel errors might be asynchronously reported\nCompile with TORCH_USE_CUDA_DSA"
    )
    assert accelerators._explain(error, "cuda:0") == (
        "CUDA error: no kernel image is available for execution on the device: "
        "its capability is 3.5, this torch is built for sm_50 sm_90"
    )


def test_the_small_kernel_runs_on_a_device_that_works():
    assert accelerators.check_kernel("cpu") == ""


def test_a_device_that_computes_wrongly_is_unusable(monkeypatch):
    import torch

    real = torch.allclose
    monkeypatch.setattr(torch, "allclose", lambda found, *rest, **more: real(found + 1, *rest))
    assert accelerators.check_kernel("cpu") == "a small matrix product on it gives wrong numbers"


def test_a_device_registered_in_this_process_is_checked_in_this_process(monkeypatch):
    import torch

    own = torch._C._get_privateuse1_backend_name()
    pretend(monkeypatch, f"{own}:0", name="Emulated", total_memory=1)
    monkeypatch.setattr(accelerators, "_check_in_child", lambda *args: pytest.fail("in a child"))
    monkeypatch.setattr(accelerators, "check_kernel", lambda name: "")
    (found,) = accelerators.detect_accelerators()
    assert (found.device, found.usable, found.uuid) == (f"{own}:0", True, f"{own}-Emulated-0")
