"""Run before anything else: Triton kernels are interpreted, on one thread, with a cache per worker.

tests/compiled needs a process that compiles: with TRITON_INTERPRET=0 in the environment, only those
tests are collected. test_ahead_of_time.py runs them so.
"""

import os
import tempfile
from pathlib import Path

INTERPRETED = os.environ.setdefault("TRITON_INTERPRET", "1") != "0"  # read when triton is imported
collect_ignore = ["compiled"] if INTERPRETED else ["engine", "kernels", "paged"]
# Workers that share a cold cache race for its files.
os.environ["TRITON_CACHE_DIR"] = str(
    Path(tempfile.gettempdir()) / f"paged-triton-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
)

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("paged", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("paged")


def pytest_collection_modifyitems(items):
    """Long tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("run_early") is None)
