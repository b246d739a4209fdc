"""Which CPUs a worker computes on: what the container allows, and near its memory."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

from octavo_core import cgroup
from octavo_core.config import EngineConfig

logger = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")


def usable_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def num_usable_cpus() -> int:
    """Return as how many CPUs this process can compute: a container may grant less time."""
    quota = cgroup.cpu_quota()
    count = len(usable_cpus())
    return count if quota is None else max(min(count, math.ceil(quota)), 1)


def numa_nodes() -> list[list[int]]:
    """Return the CPUs of each NUMA node; one node with all of them where nothing is known."""
    found = sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    nodes = []
    for path in found:
        try:
            cpus = parse_cpu_list((path / "cpulist").read_text())
        except (OSError, ValueError):
            return [usable_cpus()]
        if cpus:  # some nodes have memory only
            nodes.append(cpus)
    return nodes or [usable_cpus()]


def parse_cpu_list(text: str) -> list[int]:
    """Read the kernel's notation of a set of CPUs, such as ``0-3,8``."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus += range(int(first), int(last or first) + 1)
    return cpus


def share_cpus(
    usable: Sequence[int], nodes: Sequence[Sequence[int]], index: int, num_workers: int
) -> list[int]:
    """Return the CPUs of one of several workers: as many for each, and within a node if they fit.

    Args:
        usable: CPUs that there are for all.
        nodes: CPUs of each NUMA node.
        index: Of the worker.
        num_workers: That share the CPUs.

    Returns:
        What is the worker's alone; all of `usable` if there are fewer than workers.
    """
    allowed = [[cpu for cpu in node if cpu in set(usable)] for node in nodes]
    allowed = [node for node in allowed if node]
    if len(usable) < num_workers:
        return list(usable)
    # Workers are dealt out among the nodes in blocks, so that neighbours stay together.
    per_node = -(-num_workers // len(allowed)) if allowed else 0
    size = len(usable) // num_workers
    if allowed and all(len(node) >= size * per_node for node in allowed):
        node = allowed[index // per_node]
        place = index % per_node
        return node[place * size : (place + 1) * size]
    in_order = [cpu for node in allowed for cpu in node] or list(usable)
    return in_order[index * size : (index + 1) * size]


def bind_worker(config: EngineConfig, rank: int, workers_here: int, threads: int) -> list[int]:
    """Keep a worker's threads on CPUs of its own, if it is a process of its own.

    Only threads that start later are bound, and memory lies on the node of the thread that
    writes it first, so this comes before weights are loaded. Not bound are: a worker within
    the engine's process, which may be the user's; workers of several engines, or of several
    machines, which don't know of each other; one with a single CPU, on which the threads of its
    connections would be in the way; and one alone on a machine with one node, where there is
    nothing to choose.

    Args:
        config: All settings.
        rank: Of the worker.
        workers_here: Workers on this machine.
        threads: That it computes with.

    Returns:
        The CPUs that it is bound to; empty if it is not.
    """
    usable, nodes = usable_cpus(), numa_nodes()
    parallel = config.parallel
    knows_all = parallel.data_parallel_size == 1 and workers_here == parallel.world_size
    if parallel.backend != "mp" or not knows_all or not hasattr(os, "sched_setaffinity"):
        return []
    cpus = share_cpus(usable, nodes, rank, workers_here)
    if workers_here == 1:
        cpus = _one_node(usable, nodes, threads)
    if len(cpus) < max(threads, 2) or len(cpus) == len(usable):
        return []
    os.sched_setaffinity(0, cpus)
    logger.info(
        "Worker %d computes with %d threads on CPUs %s", rank, threads, format_cpu_list(cpus)
    )
    return cpus


def _one_node(usable: Sequence[int], nodes: Sequence[Sequence[int]], threads: int) -> list[int]:
    """Return the CPUs of the first node that has enough; all if none has."""
    for node in nodes:
        cpus = [cpu for cpu in node if cpu in set(usable)]
        if len(cpus) >= threads:
            return cpus
    return list(usable)


def format_cpu_list(cpus: Sequence[int]) -> str:
    """Write a set of CPUs as the kernel does."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
