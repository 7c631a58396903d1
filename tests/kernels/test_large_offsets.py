"""Offsets past 2^31 elements, in a process of its own: 32-bit arithmetic would end it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attention_cases import BACKENDS

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_elements_past_two_to_the_31_are_reached(backend):
    path = filter(None, [os.environ.get("PYTHONPATH")])
    result = subprocess.run(
        [sys.executable, "-m", "large_offsets", backend],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\nexit {result.returncode}\n{result.stderr}"
    assert result.stdout.endswith("done\n")
