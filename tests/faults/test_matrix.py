"""docs/faults.md is the table of the tests in the source, with all 50 faults."""

import re

from tests.faults.matrix import EXCEPTIONS, NUM_ROWS, PAGE, find_tests, page


def test_the_page_is_up_to_date() -> None:
    """If not: python -m tests.faults.matrix --write"""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_row_has_a_test_or_a_reason() -> None:
    rows = {row for test in find_tests() for row in test.rows}
    assert rows <= set(range(1, NUM_ROWS + 1))
    assert len(re.findall(r"^\| \d+ \|", page(), flags=re.MULTILINE)) == NUM_ROWS
    assert set(range(1, NUM_ROWS + 1)) - rows - EXCEPTIONS.keys() == set()
