"""Run before anything else: Triton kernels are interpreted, on one thread, with a cache per worker."""

import os
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
# Workers that share a cold cache race for its files.
os.environ["TRITON_CACHE_DIR"] = str(
    Path(tempfile.gettempdir()) / f"paged-triton-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
)

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("paged", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("paged")
