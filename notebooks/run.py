"""Execute notebooks and save them with their outputs, in a form that has no trace of the machine.

    python notebooks/run.py                              # all, in place
    python notebooks/run.py 02_tune_block_size --into .  # one, saved in this folder instead

What a notebook reads, such as the trace that PAGED_TRACE names, it finds from this folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
CELL_SECONDS = 600  # no cell takes longer, however busy the machine
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
QUIET = "ignore:IProgress not found"  # tqdm would rather have widgets
PICTURES = "--InlineBackend.print_figure_kwargs={'dpi': 100, 'bbox_inches': 'tight'}"


def main() -> int:
    """Run what was asked for; 1 when a cell fails, and that notebook is then not saved."""
    parser = argparse.ArgumentParser(description="Execute notebooks and save their outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument(
        "--into", type=Path, default=FOLDER, metavar="DIR", help="default: in place"
    )
    options = parser.parse_args()
    for name in options.names:
        if name not in NAMES:
            parser.error(f"NAME is {name}; it must be one of {', '.join(NAMES)}")
    options.into.mkdir(parents=True, exist_ok=True)
    for name in options.names or NAMES:
        if not run(FOLDER / f"{name}.ipynb", options.into / f"{name}.ipynb"):
            return 1
    return 0


def run(source: Path, target: Path) -> bool:
    """Execute in a fresh kernel, in the current folder, and save; False when a cell fails."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name=KERNEL["name"],
        resources={"metadata": {"path": "."}},
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=[PICTURES],
        config=Config(KernelManager={"transport": "ipc"}),  # ports might collide
    )
    try:
        client.execute(env={**os.environ, "PYTHONWARNINGS": QUIET})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        print(f"{source.stem}: {error}", file=sys.stderr)
        return False
    normalise(notebook)
    nbformat.write(notebook, target)
    print(f"{source.stem}: saved as {target}")
    return True


def normalise(notebook: Any) -> None:
    """Leave sources and outputs, and nothing that differs from machine to machine."""
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", ()):
                output.data.pop("text/plain", None)  # "<Figure size ...>"
                output.metadata = {}
    notebook.metadata = {"kernelspec": KERNEL, "source_digest": source_digest(notebook)}
    notebook.nbformat_minor = 5


def source_digest(notebook: Mapping[str, Any]) -> str:
    """Changes when any cell does, so that outputs older than their code are noticed."""
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    return hashlib.sha256(repr(sources).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
