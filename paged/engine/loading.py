"""A model and its tokenizer from a folder, the hub or a GGUF file, with errors of one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged.errors import PagedError, UnsupportedModelError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelLoadError(PagedError, ValueError):
    """A model that is not where it was said to be, or cannot be read."""


def load_model(
    model: str | None, *, gguf: str | None = None, dtype: str | None = None, device: str = "cpu"
) -> tuple[Any, Any]:
    """A causal language model in eval mode, and its tokenizer.

    model  a folder, or a name on the hub; with a GGUF file on disk it may be None
    gguf   a file on disk, or one in that folder or that model of the hub
    dtype  "float32", "bfloat16", ...; None: as it was saved
    """
    name, options = _source(model, gguf)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        message = f"device {device!r} is not at hand: {_first_sentence(error)}"
        raise ModelLoadError(message) from error
    where = f"model {name}"
    if not Path(name).is_dir():
        where += " is no folder here, and the hub did not give it"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=getattr(torch, dtype) if dtype else "auto", **options
        )
    except ValueError as error:
        raise UnsupportedModelError(f"model {name}: {_first_sentence(error)}") from error
    except (OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"{where}: {_first_sentence(error)}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ImportError, ValueError) as error:
        if gguf is None and Path(name).is_dir() and not any(Path(name).glob("tokenizer*")):
            raise ModelLoadError(f"folder {name} has no tokenizer.json") from error
        raise ModelLoadError(f"tokenizer of {where}: {_first_sentence(error)}") from error
    return loaded.eval().to(device), tokenizer


def _source(model: str | None, gguf: str | None) -> tuple[str, dict[str, str]]:
    """What transformers is to be given; ModelLoadError when that can only fail."""
    if gguf is not None:
        file = Path(gguf)
        if file.is_file():
            return str(file.parent), {"gguf_file": file.name}
        if model is None or (Path(model).is_dir() and not (Path(model) / gguf).is_file()):
            raise ModelLoadError(f"GGUF file {gguf} does not exist")
    if model is None:
        raise ModelLoadError("no model: give a folder, a name on the hub or a GGUF file")
    if Path(model).is_dir():
        if gguf is None and not (Path(model) / "config.json").is_file():
            raise ModelLoadError(f"folder {model} has no config.json")
    elif Path(model).exists():
        raise ModelLoadError(f"model {model} is a file; it must be a folder or a name on the hub")
    elif not _HUB_NAME.fullmatch(model):
        raise ModelLoadError(f"folder {model} does not exist")
    return model, {} if gguf is None else {"gguf_file": gguf}


def _first_sentence(error: Exception) -> str:
    """Without the lists and the advice that follow it."""
    return re.split(r"(?<=\w)\.\s|\n", str(error).strip())[0].rstrip(".")
