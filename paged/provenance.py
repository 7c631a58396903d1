"""Where a result comes from: versions of what computed it, and the commit."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("paged", "torch", "triton", "numpy")


def versions() -> dict[str, str | None]:
    """Version of Python and of each package that figures depend on; None where it is absent."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def commit() -> str | None:
    """The commit checked out where this package lies; None outside a repository of its own."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return result.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # not merely installed inside some tree
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
