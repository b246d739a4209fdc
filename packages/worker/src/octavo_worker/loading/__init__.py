"""Reading weights from model files."""

from octavo_worker.loading.checkpoint import Checkpoint
from octavo_worker.loading.load_weights import load_weights, open_checkpoint
from octavo_worker.loading.weight_form import WeightForm

__all__ = ["Checkpoint", "WeightForm", "load_weights", "open_checkpoint"]
