"""Ways to run an engine's workers."""

from octavo_worker.executors.create import create_executor

__all__ = ["create_executor"]
