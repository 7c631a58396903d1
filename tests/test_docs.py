"""The documents do what they say: their code runs, in order, and prints what is printed below it.

Each section (##) stands alone: it starts without the names of those before it.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize("path", DOCS, ids=[path.name for path in DOCS])
def test_examples_print_what_is_printed_below_them(path):
    text = path.read_text()
    assert EXAMPLE.search(text)
    for section in re.split("^## ", text, flags=re.MULTILINE):
        names = {}
        for code, output in EXAMPLE.findall(section):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, path.name, "exec"), names)
            assert printed.getvalue() == output
