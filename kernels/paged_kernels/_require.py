"""The single requirements that validation is made of, worded once.

Each error names the argument, what came and what is wanted: TypeError for a wrong kind or dtype,
ValueError for everything else. None of them reads a value off a device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOAT32 = (torch.float32,)
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INT_DTYPES = (torch.int32, torch.int64)


def require_tensor(
    name: str,
    value: object,
    dtypes: tuple[torch.dtype, ...],
    axes: str,
    sizes: tuple[int | None, ...],
    device: torch.device | None,
) -> None:
    """A tensor of one of `dtypes` with shape `sizes` (None: any size), which `axes` spells out."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor {axes} of {_names(dtypes)}, got {kind(value)}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be {_names(dtypes)}, got {dtype_name(value.dtype)}")
    if device is not None and value.device != device:
        raise ValueError(
            f"{name} must be on {device} like the tensors before it, got it on {value.device}"
        )
    shape = value.shape
    if len(shape) != len(sizes):
        raise ValueError(f"{name} must have {len(sizes)} axes {axes}, got shape {list(shape)}")
    for got, want in zip(shape, sizes, strict=True):
        if want is not None and got != want:
            wanted = ", ".join("any" if size is None else str(size) for size in sizes)
            raise ValueError(f"{name} must be {axes} = [{wanted}], got shape {list(shape)}")


def require_vector(
    name: str,
    value: Tensor,
    dtypes: tuple[torch.dtype, ...],
    axes: str,
    size: int | None,
    device: torch.device,
) -> None:
    """A contiguous tensor of one axis: kernels read it by plain index."""
    require_tensor(name, value, dtypes, axes, (size,), device)
    if not value.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got stride {value.stride(0)}: pass {name}.contiguous()"
        )


def require_unit_stride(name: str, tensor: Tensor) -> None:
    """The elements along the last axis lie side by side."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must have stride 1 on its last axis, got strides {tensor.stride()}: "
            f"pass {name}.contiguous()"
        )


def require_no_overlap(name: str, tensor: Tensor) -> None:
    """Every element has memory of its own, so that writing it leaves the others as they are."""
    if tensor.is_contiguous():
        return
    end = 1  # of the memory that one step along the next axis must pass
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < end:
            raise ValueError(
                f"{name} must have elements that do not overlap, got shape {list(tensor.shape)} "
                f"with strides {tensor.stride()}: pass {name}.contiguous()"
            )
        end += (size - 1) * stride


def require_device(name: str, value: Any) -> torch.device:
    """A device on which torch can place tensors."""
    try:
        device: torch.device = torch.device(value)
        torch.empty(0, device=device)
    except TypeError:
        raise TypeError(f"{name} must be a torch.device or its name, got {kind(value)}") from None
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{name} must be a device that torch has here, got {kind(value)}: {error}"
        ) from error
    return device


def require_int(name: str, value: object, least: int) -> None:
    """A Python int, so that reading it never waits for a device."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or None, got {kind(value)}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    if value >= 2**63:  # backends compute with 64 bits
        raise ValueError(f"{name} must be < 2**63, got an int of {value.bit_length()} bits")


def require_number(name: str, value: object) -> None:
    """A Python number, finite in the float32 that backends compute with."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float or None, got {kind(value)}")
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32, got {value}")


def require_bool(name: str, value: object) -> None:
    """A Python bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {kind(value)}")


def require_inference(**tensors: object) -> None:
    """There is no backward pass, so a tensor that expects one is refused while grad mode is on."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise ValueError(
                    f"{name} must not require grad, as there is no backward pass, got one that "
                    f"does: call under torch.no_grad() or pass {name}.detach()"
                )


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, as the errors call it."""
    return str(dtype).removeprefix("torch.")


def kind(value: object) -> str:
    """What came, short enough for an error."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(dtype_name(dtype) for dtype in dtypes)
