"""docs/faults.md is the table of the tests in the source, with all 50 faults."""

import re
from collections import Counter

import pytest

from tests.faults.matrix import NOT_APPLICABLE, NUM_ROWS, PAGE, Status, find_tests, page, status_of


def test_the_page_is_up_to_date() -> None:
    """If not: python -m tests.faults.matrix --write"""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_row_has_a_test_or_a_reason() -> None:
    rows = {row for row, tests in find_tests().items() if tests}
    assert len(re.findall(r"^\| \d+ \|", page(), flags=re.MULTILINE)) == NUM_ROWS
    assert set(range(1, NUM_ROWS + 1)) - rows - NOT_APPLICABLE.keys() == set()


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ({"passed": 2}, "tested"),
        ({"passed": 2, "failed": 1}, "FAILED"),
        ({"skipped": 2}, "not shown"),
        ({}, "not shown"),
    ],
)
def test_a_row_is_tested_only_if_a_test_passed_and_none_failed(
    outcomes: dict[str, int], status: Status
) -> None:
    assert status_of(1, 2, Counter(outcomes)) == status
    assert status_of(1, 0, Counter(outcomes)) == "no test"
