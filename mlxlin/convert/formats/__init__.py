"""Checkpoint formats: whatever a model is stored as, read as named tensors. `open_checkpoint` is the one entry."""

from .source import Source, describe_tensors, open_checkpoint, read_config, read_json
from .tensor import Tensor

__all__ = ["Source", "Tensor", "describe_tensors", "open_checkpoint", "read_config", "read_json"]
