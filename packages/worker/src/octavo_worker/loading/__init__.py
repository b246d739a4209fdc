"""Reading weights from model files."""

from octavo_worker.loading.checkpoint import Checkpoint
from octavo_worker.loading.load_weights import load_weights, open_checkpoint

__all__ = ["Checkpoint", "load_weights", "open_checkpoint"]
