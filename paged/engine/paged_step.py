"""One forward pass over pages: each layer's new K and V are written, then attended to."""

from __future__ import annotations

from dataclasses import dataclass

from paged_kernels import KVCache
from torch import Tensor, nn

from paged.batch import Batch

from .attention import LayerCall
from .layers import Layer


@dataclass(slots=True)
class PagedStep:
    """Answers the attention calls of one batch, whose tokens are packed, without padding.

    layers   where each attention module keeps its K and V
    rows     int64 [num_tokens]: which of the batch_size * num_tokens tokens of a call are real, in
             order; None: all. The output of the others is 0
    backend  of the kernels; None: by device
    """

    cache: KVCache
    layers: dict[nn.Module, Layer]
    batch: Batch
    backend: str | None = None
    rows: Tensor | None = None

    def attend(self, call: LayerCall) -> Tensor:
        """The output, [batch_size, num_tokens, num_heads, head_dim_v]."""
        layer = self.layers[call.module]
        if layer.writes:
            key, value = self._packed(call.key), self._packed(call.value)
            self.cache.write(layer.index, key, value, self.batch, backend=self.backend)
        out = self.cache.attend(
            layer.index,
            self._packed(call.query),
            self.batch,
            scale=call.scale,
            sliding_window=call.visible.sliding_window,
            softcap=call.softcap,
            sinks=call.sinks,
            backend=self.backend,
        )
        assert isinstance(out, Tensor)
        batch_size, _, num_tokens, _ = call.query.shape
        if self.rows is not None:
            padded = out.new_zeros(batch_size * num_tokens, *out.shape[1:])
            padded[self.rows] = out
            out = padded
        return out.reshape(batch_size, num_tokens, *out.shape[1:])

    def _packed(self, x: Tensor) -> Tensor:
        """[batch_size, heads, num_tokens, dim] as [real tokens, heads, dim]."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]
