"""The tests notice when a kernel is broken on purpose, one line at a time.

A sample runs by default; PAGED_MUTANTS=all runs the whole list, some minutes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import paged_kernels
import pytest
from mutants import MUTANTS

PACKAGE = Path(paged_kernels.__file__).parent
TESTS = Path(__file__).parent
EVERY = 1 if os.environ.get("PAGED_MUTANTS") == "all" else 8


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fault_has_exactly_one_place(mutant):
    assert (PACKAGE / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new


@pytest.mark.parametrize("mutant", MUTANTS[::EVERY], ids=lambda mutant: mutant.name)
def test_the_tests_catch(mutant, tmp_path):
    copy = tmp_path / "paged_kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = (copy / mutant.file).read_text()
    (copy / mutant.file).write_text(source.replace(mutant.old, mutant.new))

    tests = [str(TESTS / test) for test in mutant.tests.split()]
    options = "-x -q --tb=line -p no:cacheprovider -p no:xdist -W ignore::RuntimeWarning"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, "-k", "triton or launches", *options.split()],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},  # found before the real package
        cwd=TESTS.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    crashed, failed = result.returncode < 0, result.returncode == 1
    assert crashed or failed, f"nobody noticed that {mutant.name}:\n{result.stdout[-2000:]}"
