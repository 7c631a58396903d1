"""The kernels on a GPU: are they right, and how near do they come to what the memory can deliver?

    python bench/gpu.py [--quick] [--sanitize] [--json FILE] [--plot FILE]
    python bench/gpu.py --from FILE [--plot FILE]        an earlier record again; needs no GPU

Needs no installation, and a GPU with 24 GB. First every kernel is checked, in several processes
since most of that time goes to compiling; a wrong kernel is not timed, and the exit code is 1. Then
decode and prefill are timed with cold caches, in CUDA graphs where a provider can be captured,
beside dense attention and whatever other kernels are installed. What a decode reaches is given in
% of the bandwidth that a kernel reaches here that only reads. Without a GPU the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

# Run as a script, or not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu_report import Record, plot, table
from paged.provenance import commit, versions

SECONDS, QUICK_SECONDS = 150, 45  # after which no other project's kernel is started
ROUNDS, QUICK_ROUNDS = 60, 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer checks and shapes: a minute")
    parser.add_argument("--sanitize", action="store_true", help="also under compute-sanitizer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the record as PNG")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="show this record")
    args = parser.parse_args(argv)
    if args.source is not None:
        record = json.loads(args.source.read_text())
    elif (obstacle := missing()) is not None:
        print(f"bench/gpu.py: {obstacle}", file=sys.stderr)
        return 2
    else:
        record = run(torch.device("cuda", 0), args.quick, args.sanitize)
    print(table(record))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot is not None and record["rates"] is not None:
        plot(record, args.plot)
    return int(record["rates"] is None)


def missing() -> str | None:
    """What stands in the way of a run; None: nothing."""
    if not torch.cuda.is_available():
        return f"needs a GPU, and torch {torch.__version__} finds none"
    if find_spec("triton") is None:
        return "needs triton, which is not installed"
    if import_module("triton").knobs.runtime.interpret:
        return "TRITON_INTERPRET is set: kernels would be interpreted, not compiled"
    return None


def run(device: torch.device, quick: bool, sanitize: bool) -> Record:
    """Check, and unless something is wrong, time. The record is what --json writes."""
    from bench.gpu_checks import checks, run_checks
    from bench.gpu_limits import limit_checks

    start = time.monotonic()
    torch.cuda.set_device(device)
    record = environment(device) | {"quick": quick, "rates": None, "rows": []}
    todo = [*limit_checks(sanitize), *checks(quick)]
    outcomes = run_checks(todo, device, num_workers=min(12, os.cpu_count() or 1))
    record["checks"] = [asdict(outcome) for outcome in outcomes]
    if all(outcome.error is None for outcome in outcomes):
        deadline = start + (QUICK_SECONDS if quick else SECONDS)
        time_all(record, device, quick, deadline)
    record["seconds"] = time.monotonic() - start
    return record


def time_all(record: Record, device: torch.device, quick: bool, deadline: float) -> None:
    """Add rates and rows to a record. A kernel that proves wrong here ends it."""
    from bench import gpu_timing

    rounds = QUICK_ROUNDS if quick else ROUNDS
    shapes = [*gpu_timing.DECODES, *gpu_timing.PREFILLS]
    rates = gpu_timing.bandwidths(device) | {"matmul": gpu_timing.matmul_flops(device)}
    try:
        for shape in tqdm(gpu_timing.QUICK_SHAPES if quick else shapes, desc="timing"):
            rows = gpu_timing.measure(shape, device, rounds, deadline)
            record["rows"] += [asdict(row) for row in rows]
            torch.cuda.empty_cache()
    except gpu_timing.WrongKernelError as error:
        record["checks"].append({"name": "timed output", "seconds": 0.0, "error": str(error)})
        record["rows"] = []
    else:
        record["rates"] = rates


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
        "versions": versions(),
        "commit": commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def driver() -> str | None:
    """The GPU driver's version, where nvidia-smi tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.split("\n", 1)[0].strip()


if __name__ == "__main__":
    sys.exit(main())
