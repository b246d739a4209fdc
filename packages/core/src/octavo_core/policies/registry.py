"""Finds a policy by its name, wherever it was installed from."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from octavo_core.errors import ConfigError
from octavo_core.policies.protocol import SchedulingPolicy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "octavo.scheduler_policies"

# As in pyproject.toml. A source checkout on PYTHONPATH has no metadata to find them by.
_BUILT_IN = {
    "fcfs": "octavo_core.policies.fcfs:FCFSPolicy",
    "priority": "octavo_core.policies.priority:PriorityPolicy",
    "fair_share": "octavo_core.policies.fair_share:FairSharePolicy",
}

_METHODS = ("__len__", "add", "requeue", "peek", "pop", "remove", "finish", "choose_victim")


def known_policies() -> list[str]:
    """Return the names that `load_policy` takes: the built-in ones, then others by name."""
    names = _entry_points()
    return [*_BUILT_IN, *sorted(names.keys() - _BUILT_IN.keys())]


def load_policy(name: str) -> SchedulingPolicy:
    """Make a new policy, built in or registered by an installed package.

    Args:
        name: Name of an entry point in the group ``octavo.scheduler_policies``, which
            stands for a class (or function) that is called without arguments.

    Raises:
        ConfigError: No package offers the name, or several do; or what one offers can't be
            imported or is no policy.
    """
    points = _entry_points().get(name)
    if points is None:
        raise ConfigError(
            f"scheduling_policy is {name!r}; this installation knows "
            f"{', '.join(known_policies())}. A package adds one with an entry point in the group "
            f"{ENTRY_POINT_GROUP}.",
            field="scheduling_policy",
        )
    if len(points) > 1:
        offers = " and ".join(f"{_source_of(point)} ({point.value})" for point in points)
        raise ConfigError(
            f"scheduling_policy {name!r} is offered by {offers}; uninstall all but one.",
            field="scheduling_policy",
        )
    return _make(points[0])


def _make(point: EntryPoint) -> SchedulingPolicy:
    who = f"scheduling_policy {point.name!r}, which {_source_of(point)} offers as {point.value},"
    try:
        policy = point.load()()
    except Exception as error:  # anything can go wrong in somebody else's code
        raise ConfigError(
            f"{who} can't be used: {type(error).__name__}: {error}.", field="scheduling_policy"
        ) from error
    missing = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise ConfigError(
            f"{who} is no scheduling policy: {type(policy).__name__} lacks {', '.join(missing)}.",
            field="scheduling_policy",
        )
    return cast(SchedulingPolicy, policy)


def _entry_points() -> dict[str, list[EntryPoint]]:
    """Return what is offered under each name, the same thing once."""
    # Here, since it takes 20 ms to import and a scheduler can be had without it.
    from importlib.metadata import EntryPoint, entry_points

    found: dict[str, dict[str, EntryPoint]] = {
        name: {value: EntryPoint(name, value, ENTRY_POINT_GROUP)}
        for name, value in _BUILT_IN.items()
    }
    for point in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(point.name, {})[point.value] = point
    return {name: list(points.values()) for name, points in found.items()}


def _source_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "octavo-core"
