"""The kernels on a GPU: are they right, and how near do they come to what the memory can deliver?

Needs no installation, and a GPU with 24 GB. First every kernel is checked, in several processes
since most of that time goes to compiling; a wrong kernel is not timed. Then decode and prefill are
timed with cold caches, in CUDA graphs where a provider can be captured, beside dense attention and
whatever other kernels are installed. What a decode reaches is given in % of the bandwidth that a
kernel reaches here that only reads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from tqdm import tqdm

from bench import gpu_report
from bench.records import NotMeasuredError
from bench.report import Result

table, plot = gpu_report.table, gpu_report.plot
SECONDS, QUICK_SECONDS = 150, 45  # after which no other project's kernel is started
ROUNDS, QUICK_ROUNDS = 60, 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sanitize", action="store_true", help="also under compute-sanitizer")


def run(options: argparse.Namespace) -> Result:
    """Check, and unless something is wrong, time."""
    if (obstacle := missing()) is not None:
        raise NotMeasuredError(obstacle)
    return measure(torch.device("cuda", 0), options.quick, options.sanitize)


def missing() -> str | None:
    """What stands in the way of a run; None: nothing."""
    if not torch.cuda.is_available():
        return f"needs a GPU, and torch {torch.__version__} finds none"
    if find_spec("triton") is None:
        return "needs triton, which is not installed"
    if import_module("triton").knobs.runtime.interpret:
        return "TRITON_INTERPRET is set: kernels would be interpreted, not compiled"
    return None


def measure(device: torch.device, quick: bool, sanitize: bool) -> Result:
    """The result on one GPU; `rates` is None when a kernel is wrong, and then nothing is timed."""
    from bench.gpu_checks import checks, run_checks
    from bench.gpu_limits import limit_checks

    start = time.monotonic()
    torch.cuda.set_device(device)
    result: Result = environment(device) | {"rates": None, "rows": []}
    todo = [*limit_checks(sanitize), *checks(quick)]
    outcomes = run_checks(todo, device, num_workers=min(12, os.cpu_count() or 1))
    result["checks"] = [asdict(outcome) for outcome in outcomes]
    if all(outcome.error is None for outcome in outcomes):
        time_all(result, device, quick, start + (QUICK_SECONDS if quick else SECONDS))
    failed = [check for check in result["checks"] if check["error"] is not None]
    result["failures"] = [f"FAILED {check['name']}: {check['error']}" for check in failed]
    return result | {"records": gpu_report.records_of(result)}


def time_all(result: Result, device: torch.device, quick: bool, deadline: float) -> None:
    """Add rates and rows to a result. A kernel that proves wrong here ends it."""
    from bench import gpu_timing

    rounds = QUICK_ROUNDS if quick else ROUNDS
    shapes = [*gpu_timing.DECODES, *gpu_timing.PREFILLS]
    rates = gpu_timing.bandwidths(device) | {"matmul": gpu_timing.matmul_flops(device)}
    try:
        for shape in tqdm(gpu_timing.QUICK_SHAPES if quick else shapes, desc="timing"):
            rows = gpu_timing.measure(shape, device, rounds, deadline)
            result["rows"] += [asdict(row) for row in rows]
            torch.cuda.empty_cache()
    except gpu_timing.WrongKernelError as error:
        result["checks"].append({"name": "timed output", "seconds": 0.0, "error": str(error)})
        result["rows"] = []
    else:
        result["rates"] = rates


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver(),
        "cuda": torch.version.cuda,
    }


def driver() -> str | None:
    """The GPU driver's version, where nvidia-smi tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.split("\n", 1)[0].strip()
