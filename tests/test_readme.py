"""The README does what it says: its example runs, its block size table is computed."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from paged.trace import sample_requests

README = (Path(__file__).parents[1] / "README.md").read_text()
SHORT_TEXTS = range(64, 193)


def final_waste(lengths, block_size):
    """Share of the slots in used blocks that holds no token when all sequences are complete."""
    slots = sum(-(-length // block_size) * block_size for length in lengths)
    return 1 - sum(lengths) / slots


def test_the_example_prints_what_is_printed_below_it():
    ((code, output),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 20
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == output


def test_the_block_size_table_is_computed():
    lengths = [r.prompt_len + r.output_len for r in sample_requests(50_000, seed=0)]
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) % \|", README, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 8, 16, 32, 64, 128, 256]
    for block_size, empty, trace_waste, short_waste in rows:
        assert float(empty) == (int(block_size) - 1) / 2
        assert float(trace_waste) == pytest.approx(
            100 * final_waste(lengths, int(block_size)), abs=0.1
        )
        assert float(short_waste) == pytest.approx(
            100 * final_waste(SHORT_TEXTS, int(block_size)), abs=0.06
        )


def test_every_linked_file_is_there():
    links = re.findall(r"\]\(((?!https?:)[^)]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).parents[1] / link).exists(), link
