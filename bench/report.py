"""Results as files: what was run, where, by which code. Everything shown is read from there."""

from __future__ import annotations

import json
import math
import os
import platform
from argparse import Namespace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.records import KINDS, BenchError
from paged.provenance import commit, versions

Result = dict[str, Any]
# Of each record, of any kind.
FIELDS: dict[str, Any] = {"name": str, "kind": str, "unit": str, "value": (int, float), "lower": (int, float),
          "upper": (int, float), "repeats": int}  # fmt: skip


def envelope(name: str, options: Namespace) -> Result:
    """All that figures depend on but the figures; taken when a benchmark starts."""
    plain = {key: value for key, value in vars(options).items() if key != "out"}
    return {
        "benchmark": name,
        "options": {key: _plain(value) for key, value in plain.items()},
        "seed": options.seed,
        "threads": options.threads,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Any]:
    """The computer, and how busy it is: `load` is the number of processes that want to run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
    }


def heading(result: Result) -> str:
    """One line: what, where, by which code."""
    options = result["options"]
    return (
        f"{result['benchmark']}{', quick' if options['quick'] else ''}: {where(result)}, "
        f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}, seed {result['seed']}, "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
        + f", commit {(result['commit'] or 'unknown')[:10]}"
    )


def where(result: Result) -> str:
    """The computer in a few words."""
    computer = result["machine"]
    return (
        f"{computer['cpu']}, {computer['cores']} cores, {computer['memory_gib']:.0f} GiB, "
        f"load {computer['load']}"
    )


def file_name(result: Result) -> str:
    """Of the JSON file in a folder of results, without its ending."""
    return f"{result['benchmark']}{'-quick' if result['options']['quick'] else ''}"


def write_result(result: Result, folder: Path) -> Path:
    """Write a result as JSON; the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_name(result)}.json"
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def read_result(path: Path) -> Result:
    """A file that `write_result` wrote. BenchError for any other."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from error
    wanted = {"benchmark", "options", "machine", "versions", "records"}
    if not isinstance(result, dict) or not wanted <= set(result):
        raise BenchError(
            f"{path} is no result of a benchmark: it wants {', '.join(sorted(wanted))}"
        )
    for number, record in enumerate(result["records"]):
        if not _is_record(record):
            raise BenchError(f"{path}, record {number}: wants {', '.join(FIELDS)}")
    return result


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and all(isinstance(record.get(name), kind) for name, kind in FIELDS.items())
        and all(math.isfinite(record[name]) for name in ("value", "lower", "upper"))
        and record["kind"] in KINDS
    )


def _plain(value: Any) -> Any:
    """As JSON takes it; of a path only the name, which means the same elsewhere."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Path) else value


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
