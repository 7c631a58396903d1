"""The documents do what they say: their code runs, in order, and prints what is printed below it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize("path", DOCS, ids=[path.name for path in DOCS])
def test_examples_print_what_is_printed_below_them(path):
    examples = EXAMPLE.findall(path.read_text())
    assert examples
    names = {}
    for code, output in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, path.name, "exec"), names)
        assert printed.getvalue() == output
