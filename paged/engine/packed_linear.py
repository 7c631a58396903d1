"""Linear layers of a model on a CPU, with their weights laid out for oneDNN.

A decode step multiplies a few rows with every weight. torch's own layout makes that read each
weight twice or more; in oneDNN's blocked layout it is read once. `torch.compile` with frozen
weights does the same, for a fixed number of rows.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """What a float32 `nn.Linear` computes, within rounding. It has no weight to train or save."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def pack_linear_layers(model: nn.Module) -> int:
    """Replace the linear layers of a model by packed ones, in place; how many were replaced.

    For inference alone: a packed layer cannot be trained, moved or saved. A weight that an embedding
    shares stays there, too. Layers that are not on a CPU, not float32 or of a class of their own
    stay as they are; so does everything where torch lacks oneDNN.

    Raises TypeError when `model` is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; it must be a torch.nn.Module")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    packed: dict[Any, PackedLinear] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if path and _can_pack(module):
            if module not in packed:
                packed[module] = PackedLinear(module)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, packed[module])
    return len(packed)


def _can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
