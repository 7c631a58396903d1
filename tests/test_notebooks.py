"""Notebooks run, and their committed outputs are those of their code: small, and of no one machine.

They run as in a fresh clone: without a trace, and with random weights in place of a real model.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = ["01_block_tables", "02_tune_block_size", "03_paged_vs_dense", "04_real_model"]
MOST_BYTES = 400_000
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])/\w+/\w")

source_digest = runpy.run_path(str(FOLDER / "run.py"))["source_digest"]


def read(name, folder=FOLDER):
    return json.loads((folder / f"{name}.ipynb").read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell):
    """What a cell puts out: text, pictures, errors."""
    data = [list(output.get("data", ())) for output in cell["outputs"]]
    return [output["output_type"] for output in cell["outputs"]], data


def texts(notebook):
    """All that can be read: sources and outputs."""
    for cell in notebook["cells"]:
        yield "".join(cell["source"])
        for output in cell.get("outputs", ()):
            yield "".join(output.get("text", ()))
            yield "".join(output.get("data", {}).get("text/plain", ()))


@pytest.mark.run_early
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_shows_what_is_committed(name, tmp_path):
    for package in ("nbclient", "transformers"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'paged[notebooks,models]'")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PAGED_TRACE", "TRITON_INTERPRET")
    }
    environment |= {"PAGED_SMOLLM2": str(tmp_path / "absent"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / "run.py"), name, "--into", str(tmp_path)]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True)
    committed, executed = read(name), read(name, tmp_path)
    assert executed["metadata"] == committed["metadata"]
    assert list(map(kinds, code_cells(executed))) == list(map(kinds, code_cells(committed)))


def test_all_of_them_are_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_are_those_of_the_code(name):
    notebook = read(name)
    assert notebook["metadata"]["source_digest"] == source_digest(notebook), (
        f"cells of {name} have changed: run `python notebooks/run.py {name}`"
    )
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", ()) for output in outputs) >= 3
    assert {output["output_type"] for output in outputs} <= {
        "stream",
        "execute_result",
        "display_data",
    }
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}


@pytest.mark.parametrize("name", NAMES)
def test_committed_files_are_small_and_of_no_one_machine(name):
    assert (FOLDER / f"{name}.ipynb").stat().st_size <= MOST_BYTES
    notebook = read(name)
    assert set(notebook["metadata"]) == {"kernelspec", "source_digest"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert not any(cell["metadata"] for cell in notebook["cells"])
    for text in texts(notebook):
        assert not ABSOLUTE_PATH.search(text), text
        assert str(Path.home()) not in text


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    for text in texts(read(name)):
        for link in re.findall(r"\]\(((?!https?:)[^)]+)\)", text):
            assert (FOLDER / link).exists(), link
