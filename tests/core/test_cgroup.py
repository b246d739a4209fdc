"""Limits of containers, from folders laid out as Linux has them."""

from __future__ import annotations

import pytest

from octavo_core import cgroup, host_memory


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files of the fake groups; `groups` is what /proc/self/cgroup says."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "groups")

    def write(groups, **files):
        (tmp_path / "groups").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def test_no_groups(write):
    write("")
    assert cgroup.memory_left() is None
    assert cgroup.cpu_quota() is None


def test_version_2_within_its_own_namespace(write):
    files = {"memory_dot_max": "5000\n", "memory_dot_current": "4500\n"}
    files |= {"memory_dot_stat": "anon 5\ninactive_file 500\n", "cpu_dot_max": "150000 100000\n"}
    write("0::/\n", **files)
    assert cgroup.memory_left() == 1000
    assert cgroup.cpu_quota() == 1.5
    assert host_memory.available_host_memory() == 1000
    write("0::/\n", memory_dot_max="max\n", cpu_dot_max="max 100000\n")
    assert cgroup.memory_left() is None
    assert cgroup.cpu_quota() is None


def test_a_limit_of_a_group_above_counts(write):
    files = {"memory_dot_max": "5000", "memory_dot_current": "1000", "cpu_dot_max": "400000 100000"}
    above = {f"a__{name}": text for name, text in files.items()}
    write("0::/a/b\n", **above, a__b__memory_dot_max="max", a__b__cpu_dot_max="200000 100000")
    assert cgroup.memory_left() == 4000
    assert cgroup.cpu_quota() == 2.0


def test_version_1(write):
    limits = {"memory_dot_limit_in_bytes": "9000", "memory_dot_usage_in_bytes": "7000"}
    files = {f"memory__box__{name}": text for name, text in limits.items()}
    files["memory__box__memory_dot_stat"] = "inactive_file 1\ntotal_inactive_file 2000\n"
    files |= {"cpu,cpuacct__box__cpu_dot_cfs_quota_us": "50000"}
    files |= {"cpu,cpuacct__box__cpu_dot_cfs_period_us": "100000"}
    groups = "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n"
    write(groups, **files)
    assert cgroup.memory_left() == 4000
    assert cgroup.cpu_quota() == 0.5
    write(groups, **{"cpu,cpuacct__box__cpu_dot_cfs_quota_us": "-1"})
    assert cgroup.cpu_quota() is None


def test_a_container_that_sees_its_own_group_as_the_root(write):
    """Its path in /proc is that of the host, of which nothing is mounted."""
    write(
        "4:memory:/docker/0123\n",
        memory__memory_dot_limit_in_bytes="100",
        memory__memory_dot_usage_in_bytes="300",
    )
    assert cgroup.memory_left() == 0


def test_what_is_no_number_is_no_limit(write):
    write("0::/\nrubbish\n1:x\n", memory_dot_max="?", memory_dot_current="", cpu_dot_max="a b c")
    assert cgroup.memory_left() is None
    assert cgroup.cpu_quota() is None
