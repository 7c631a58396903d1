"""Whether a result can be written, asked before the work that makes it."""

from __future__ import annotations

import os
from pathlib import Path


def require_writable(path: Path) -> None:
    """Raise OSError when the file cannot be written. A new one is not left behind."""
    is_new = not os.path.lexists(path)
    path.open("a").close()
    if is_new:
        path.unlink()
