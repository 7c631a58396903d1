"""`python -m paged size`: what a KV cache costs, and how much of it fits into a memory."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paged.config import block_bytes, check_int, num_blocks_that_fit
from paged.errors import PagedError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}I": 2 ** (10 * power) for power, unit in enumerate("KMGT", start=1)}
LENGTHS = (128, 1024, 8192, 32768)

# The names under which Hugging Face configs of different families keep the same number.
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads")
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")


class ModelConfigError(PagedError, ValueError):
    """A model's config.json that cannot be read, or whose KV cache is not K and V per head."""


@dataclass(frozen=True)
class ModelShape:
    """What the KV cache of a model depends on. Every layer counts as one that keeps all tokens."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    heads: int | None = field(default=None, compare=False)  # of queries: none are cached


@dataclass(frozen=True)
class CacheSize:
    """The answer, in bytes, blocks and tokens. `sequences` maps a length to how many fit at once."""

    block_size: int
    bytes_per_token_one_layer: int
    bytes_per_token: int
    bytes_per_block_one_layer: int
    bytes_per_block: int
    num_blocks: int
    num_tokens: int
    sequences: dict[int, int]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return asdict(self)


def parse_bytes(text: str) -> int:
    """Bytes of '80GiB' (binary), '80GB' or '80G' (decimal), '1.5TiB', or a plain number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"memory must look like 80GiB, 24GB or 1048576, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def read_model_config(path: str | Path) -> ModelShape:
    """The shape of the model that a Hugging Face config.json, or the folder with it, describes."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"config {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelConfigError(f"config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelConfigError(f"config {path} must hold a JSON object")
    dtype = config.get("dtype") or config.get("torch_dtype")
    if isinstance(config.get("text_config"), dict):  # a model of several modalities
        config = config["text_config"]
        dtype = config.get("dtype") or config.get("torch_dtype") or dtype
    if config.get("kv_lora_rank") is not None:
        raise ModelConfigError(
            f"config {path}: latent attention (kv_lora_rank) caches one vector per token,"
            " not K and V per head"
        )

    def find(*names: str) -> int:
        for name in names:
            value = config.get(name)
            if value is not None:
                if type(value) is not int or value < 1:
                    raise ModelConfigError(
                        f"config {path}: {name} must be an integer >= 1, got {value!r}"
                    )
                return value
        raise ModelConfigError(f"config {path} has no {names[0]}")

    heads = find(*HEAD_KEYS)
    return ModelShape(
        layers=find(*LAYER_KEYS),
        kv_heads=find("num_key_value_heads", "num_kv_heads", *HEAD_KEYS),
        head_dim=find("head_dim") if config.get("head_dim") else find(*HIDDEN_KEYS) // heads,
        dtype=str(dtype or "float16").removeprefix("torch."),
        heads=heads,
    )


def size_cache(
    shape: ModelShape,
    *,
    memory: int,
    used: int = 0,
    utilization: float = 0.9,
    block_size: int = 16,
    lengths: Sequence[int] = LENGTHS,
) -> CacheSize:
    """Blocks of `shape` in a device of `memory` bytes, `used` of them taken (weights, for example).

    `utilization` is the share of the whole device that may be used at all. Raises ValueError,
    with the numbers, when not one block fits.
    """

    def cost(tokens: int, layers: int) -> int:
        return block_bytes(tokens, shape.kv_heads, shape.head_dim, shape.dtype, layers)

    if used > memory:
        raise ValueError(f"used is {used:,} bytes, more than the memory of {memory:,}")
    bytes_per_block = cost(block_size, shape.layers)
    num_blocks = num_blocks_that_fit(memory - used, memory, utilization, bytes_per_block)
    return CacheSize(
        block_size=block_size,
        bytes_per_token_one_layer=cost(1, 1),
        bytes_per_token=cost(1, shape.layers),
        bytes_per_block_one_layer=cost(block_size, 1),
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
        num_tokens=num_blocks * block_size,
        sequences={length: num_blocks // -(-length // block_size) for length in lengths},
    )


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `shape_from` reads."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="a model's config.json, Hugging Face style, or its folder")
    add("--layers", type=int, help="layers of the model (default: from --config)")
    add("--kv-heads", type=int, help="KV heads per layer (default: from --config)")
    add("--head-dim", type=int, help="width of a head (default: from --config)")
    add("--dtype", help="of the cache (default: from --config, else float16)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m paged size`."""
    add_shape_arguments(parser)
    add = parser.add_argument
    add("--memory", default="80GiB", metavar="SIZE", help="the whole device (default: %(default)s)")
    add(
        "--used",
        default="0GiB",
        metavar="SIZE",
        help="taken by weights and others (default: %(default)s)",
    )
    add(
        "--utilization",
        type=float,
        default=0.9,
        help="share of the device to use (default: %(default)s)",
    )
    add("--block-size", type=int, default=16, help="tokens per block (default: %(default)s)")
    add(
        "--lengths",
        type=int,
        nargs="+",
        default=list(LENGTHS),
        metavar="TOKENS",
        help="sequence lengths to count (default: 128 1024 8192 32768)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the size of the cache that the options describe."""
    shape = shape_from(args)
    check_int("the shortest of lengths", min(args.lengths), minimum=1)
    size = size_cache(
        shape,
        memory=parse_bytes(args.memory),
        used=parse_bytes(args.used),
        utilization=args.utilization,
        block_size=args.block_size,
        lengths=args.lengths,
    )
    print(
        f"{shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim}, {shape.dtype};"
        f" blocks of {size.block_size} tokens; {args.memory} with {args.used} used,"
        f" utilization {args.utilization}"
    )
    print(f"{'':22}{'one layer':>16}{'all layers':>16}")
    print(
        f"{'bytes per token':22}{size.bytes_per_token_one_layer:>16,}{size.bytes_per_token:>16,}\n"
        f"{'bytes per block':22}{size.bytes_per_block_one_layer:>16,}{size.bytes_per_block:>16,}"
    )
    print(f"{'blocks':38}{size.num_blocks:>16,}\n{'tokens':38}{size.num_tokens:>16,}")
    for length, count in size.sequences.items():
        print(f"{f'sequences of {length:,} tokens':38}{count:>16,}")
    return 0


def shape_from(args: argparse.Namespace) -> ModelShape:
    """The model of --config, each number replaced by its own option where one is given."""
    given = {name: getattr(args, name) for name in ("layers", "kv_heads", "head_dim", "dtype")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.config is not None:
        base = asdict(read_model_config(args.config))
    else:
        base = {"dtype": "float16"}
        missing = {"layers", "kv_heads", "head_dim"} - set(given)
        if missing:
            flags = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in missing))
            raise ValueError(f"without --config, {flags} must be given")
    merged = base | given
    for name in ("layers", "kv_heads", "head_dim"):
        check_int(name, merged[name], minimum=1)
    shape = ModelShape(**merged)
    block_bytes(1, shape.kv_heads, shape.head_dim, shape.dtype)  # refuses a dtype of no cache
    return shape
