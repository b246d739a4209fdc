"""Model definitions, by architecture name."""

from octavo_worker.models.model import KVCache, Model, WeightEntry, WeightPart
from octavo_worker.models.registry import resolve_model_class

__all__ = ["KVCache", "Model", "WeightEntry", "WeightPart", "resolve_model_class"]
