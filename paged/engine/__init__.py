"""Continuous batching of transformers models over paged K and V. Needs the extra `models`."""

from .runner import ModelRunner

__all__ = ["ModelRunner"]
