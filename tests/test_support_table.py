"""The README says what the tests show."""

from pathlib import Path

import pytest
from support_table import support_table

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- support-table -->", "<!-- /support-table -->"


def test_readme_holds_the_table_that_the_tests_generate():
    text = README.read_text()
    if START not in text:
        pytest.skip("README.md has no place marked for the support table")
    written = text.split(START)[1].split(END)[0].strip()
    assert written == support_table(), "run: python tests/support_table.py, paste between the marks"
