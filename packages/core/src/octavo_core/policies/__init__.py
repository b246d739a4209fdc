"""Who goes first, and who has to make room: one class for each answer.

A policy of your own is a `QueuePolicy` with a ``sort_key``, or anything that has the
methods of `SchedulingPolicy`. docs/scheduling-policies.md shows one.
"""

from octavo_core.policies.fair_share import FairSharePolicy
from octavo_core.policies.fcfs import FCFSPolicy
from octavo_core.policies.priority import PriorityPolicy
from octavo_core.policies.protocol import SchedulingPolicy
from octavo_core.policies.queue_policy import QueuePolicy
from octavo_core.policies.registry import known_policies, load_policy

__all__ = [
    "FCFSPolicy",
    "FairSharePolicy",
    "PriorityPolicy",
    "QueuePolicy",
    "SchedulingPolicy",
    "known_policies",
    "load_policy",
]
