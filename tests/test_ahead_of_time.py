"""The tests of the compiled kernels, in processes whose Triton compiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILED = sorted((Path(__file__).parent / "compiled").glob("test_*.py"))


@pytest.mark.run_early  # minutes each
@pytest.mark.parametrize("path", COMPILED, ids=[path.stem for path in COMPILED])
def test_compiled_kernels(path):
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment["TRITON_INTERPRET"] = "0"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    root = path.parents[2]
    run = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    summary = run.stdout.strip().splitlines()[-1]
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "passed" in summary
    assert "skipped" not in summary
