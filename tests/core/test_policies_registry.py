"""How a policy is found by its name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo_core.config import resolve_config
from octavo_core.engine_core import EngineCore
from octavo_core.errors import ConfigError
from octavo_core.policies import (
    FairSharePolicy,
    FCFSPolicy,
    PriorityPolicy,
    known_policies,
    load_policy,
)
from octavo_core.policies.registry import _BUILT_IN, ENTRY_POINT_GROUP
from support.engine_fakes import FakeExecutor, tiny_spec

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with a module and entry points on the path, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(distribution: str, entry_points: str, **modules: str) -> None:
        folder = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        (folder / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{entry_points}\n")
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)

    return write


@pytest.mark.parametrize(
    ("name", "policy"),
    [("fcfs", FCFSPolicy), ("priority", PriorityPolicy), ("fair_share", FairSharePolicy)],
)
def test_built_in_policies_are_found_and_new_each_time(name: str, policy: type) -> None:
    assert type(load_policy(name)) is policy
    assert load_policy(name) is not load_policy(name)


def test_the_entry_points_of_the_package_are_the_built_in_ones() -> None:
    pyproject = Path(__file__).parents[2] / "packages" / "core" / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    assert project["entry-points"][ENTRY_POINT_GROUP] == _BUILT_IN


def test_an_unknown_name_is_refused_with_those_that_are_known(install: Install) -> None:
    install("acme-policies", "lottery = acme:Lottery")
    with pytest.raises(ConfigError) as refused:
        load_policy("round_robin")
    assert "'round_robin'" in refused.value.message
    assert "fcfs, priority, fair_share, lottery" in refused.value.message
    assert refused.value.field == "scheduling_policy"
    assert known_policies()[:3] == ["fcfs", "priority", "fair_share"]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import no_such_module_anywhere", "no_such_module_anywhere"),
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("", "has no attribute 'Lottery'"),
        ("Lottery = 5", "not callable"),
        ("class Lottery:\n    def __init__(self, seed): ...", "seed"),
        ("class Lottery:\n    add = pop = None", "lacks __len__, add"),
    ],
)
def test_one_that_does_not_work_is_refused_with_its_package(
    install: Install, code: str, problem: str
) -> None:
    install("acme-policies", "lottery = acme:Lottery", acme=code)
    with pytest.raises(ConfigError) as refused:
        load_policy("lottery")
    for part in ("'lottery'", "acme-policies", "acme:Lottery", problem):
        assert part in refused.value.message


def test_one_name_of_two_packages_is_refused_with_both(install: Install) -> None:
    install("acme-policies", "lottery = acme:Lottery", acme="class Lottery: ...")
    install("other-policies", "lottery = other:Lottery\nfcfs = other:Mine")
    with pytest.raises(ConfigError, match=r"acme-policies.*other-policies|other.*acme"):
        load_policy("lottery")
    with pytest.raises(ConfigError, match="other-policies"):
        load_policy("fcfs")


def test_an_engine_takes_the_policy_of_its_configuration() -> None:
    config = resolve_config({"scheduling_policy": "priority", "num_gpu_blocks_override": "500"})
    engine = EngineCore(config, tiny_spec(), FakeExecutor(16, 128))
    engine.start(lambda stage, progress: None)
    assert isinstance(engine.scheduler._policy, PriorityPolicy)


def test_an_engine_refuses_an_unknown_policy_before_it_loads_anything() -> None:
    executor = FakeExecutor(16, 128)
    executor.load_model = None  # type: ignore[assignment]
    engine = EngineCore(resolve_config({"scheduling_policy": "x"}), tiny_spec(), executor)
    with pytest.raises(ConfigError, match="scheduling_policy is 'x'"):
        engine.start(lambda stage, progress: None)


def test_looking_for_entry_points_is_left_until_a_policy_is_asked_for() -> None:
    code = (
        "import sys; before = set(sys.modules); import octavo_core.scheduler\n"
        "print('importlib.metadata' in set(sys.modules) - before)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "False"
