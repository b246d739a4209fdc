"""The custom policy of docs/scheduling-policies.md works as it is printed."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from octavo_core.block_manager import BlockManager
from octavo_core.config import SchedulerConfig
from octavo_core.policies import PriorityPolicy, known_policies, load_policy
from octavo_core.policies.registry import _METHODS, ENTRY_POINT_GROUP
from octavo_core.scheduler import Scheduler
from support.engine_fakes import make_request

PAGE = (Path(__file__).parents[2] / "docs" / "scheduling-policies.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the example, and return the name it is chosen by."""
    project = tomllib.loads(EXAMPLES["pyproject.toml"])["project"]
    ((name, target),) = project["entry-points"][ENTRY_POINT_GROUP].items()
    (tmp_path / "shortest_prompt_first.py").write_text(EXAMPLES["shortest_prompt_first.py"])
    info = tmp_path / "shortest_prompt_first-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: shortest-prompt-first\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shortest_prompt_first", raising=False)
    return str(name)


def test_the_example_runs_in_a_scheduler(installed: str) -> None:
    assert f"--scheduling-policy {installed}" in PAGE
    assert installed in known_policies()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2), BlockManager(100, 4), 1000, load_policy(installed)
    )
    for name, prompt in [("long", 50), ("longest", 90), ("short", 3)]:
        scheduler.add_request(make_request(name, prompt))
    admitted = [request.request_id for request in scheduler.schedule().new_requests]
    assert admitted == ["short", "long"]


def test_the_example_is_short() -> None:
    assert len("".join(EXAMPLES.values()).splitlines()) <= 20


def test_the_page_has_the_numbers_of_the_code() -> None:
    k = PriorityPolicy()._promote_every
    assert f"every {k}th admission" in PAGE
    assert f"at most {k} (m + 1)" in PAGE
    assert len(_METHODS) == 8
    assert "the eight methods" in PAGE
