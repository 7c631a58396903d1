"""The tests of the compiled kernels, in a process whose Triton compiles."""

import os
import subprocess
import sys
from pathlib import Path

COMPILED = Path(__file__).parent / "compiled"


def test_every_kernel_compiles_for_every_target():
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment["TRITON_INTERPRET"] = "0"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(COMPILED)]
    root = COMPILED.parents[1]
    run = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    summary = run.stdout.strip().splitlines()[-1]
    print(f"ahead of time: {summary}")
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "passed" in summary
    assert "skipped" not in summary
