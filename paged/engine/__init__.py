"""Continuous batching of transformers models over paged K and V. Needs the extra `models`."""

from .engine import Engine
from .packed_linear import pack_linear_layers
from .paged_cache import PagedCache
from .request import CompletionOutput, RequestMetrics, RequestOutput
from .runner import ModelRunner
from .sampling import SamplingParams

__all__ = [
    "CompletionOutput",
    "Engine",
    "ModelRunner",
    "PagedCache",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "pack_linear_layers",
]
