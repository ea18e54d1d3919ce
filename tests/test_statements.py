"""The ratchet of `make check`: who grows is named, and a number rises only with a reason."""

import tomllib
from collections import Counter

import pytest

from tests import statements

WRITTEN = {"statements": {"txl_dist/model": 100, "cluster": 50}}
RAISED = {"part": "cluster", "by": 5, "reason": "it counts lost nodes"}


def test_a_part_that_grew_is_named_until_a_reason_is_written() -> None:
    grown = Counter({"txl_dist/model": 70, "cluster": 55})
    (too_many,), (fewer,) = statements.compare(WRITTEN, grown)
    assert too_many.startswith("cluster has 55 statements, 50 are allowed")
    assert fewer.startswith("txl_dist/model has 70 statements, 100 are allowed")
    assert statements.compare(WRITTEN | {"raised": [RAISED]}, grown)[0] == []
    with pytest.raises(SystemExit, match="reason"):
        statements.compare(WRITTEN | {"raised": [RAISED | {"reason": "more"}]}, grown)


def test_writing_the_numbers_keeps_reasons_and_does_not_raise_the_sum() -> None:
    moved = Counter({"txl_dist/model": 90, "cluster": 55, "txl_dist/new": 10})
    written = tomllib.loads(statements.rewritten(WRITTEN | {"raised": [RAISED]}, moved))
    assert statements.limits(written) == moved
    assert written["raised"] == [RAISED]
    with pytest.raises(SystemExit, match=r"155 statements, 150 are allowed"):
        statements.rewritten(WRITTEN, moved)


def test_every_part_of_the_packages_is_counted() -> None:
    counted = statements.count(statements.ROOT)
    assert {"cluster", "txl_dist", "txl_dist/training", "data_pipeline/streams"} <= set(counted)
    assert min(counted.values()) > 0, "an empty part has nothing to count"
