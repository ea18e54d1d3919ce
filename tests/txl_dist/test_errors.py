"""Errors: the tree in the docstring is the tree of the classes, with their exit codes."""

import re

import pytest

import data_pipeline.errors as data_errors
from data_pipeline.errors import counted
from txl_dist import errors
from txl_dist.errors import TxlError, error_from_json, error_to_json


def test_the_tree_in_the_docstring_is_that_of_the_classes() -> None:
    classes = {**vars(data_errors), **vars(errors)}
    parents: list[type] = []
    drawn = set()
    for indent, name, code in re.findall(r"(?m)^    ( *)(\w+Error) +(\d+) ", errors.__doc__ or ""):
        depth, cls = len(indent) // 2, classes[name]
        assert cls.__bases__ == ((parents[depth - 1] if depth else Exception),), name
        assert cls.exit_code == int(code), name
        parents[depth:] = [cls]
        drawn.add(cls)
    defined = {c for c in classes.values() if isinstance(c, type) and issubclass(c, TxlError)}
    assert drawn == defined


@pytest.mark.parametrize(("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (1200, "1,200 ranks")])
def test_a_number_has_its_noun_in_the_singular_only_if_it_is_one(number: int, text: str) -> None:
    assert counted(number, "rank") == text


def test_an_error_of_another_process_is_recreated() -> None:
    for name in errors.__all__:
        error = error_from_json(error_to_json(getattr(errors, name)("some text"), max_chars=4))
        assert (type(error).__name__, str(error)) == (name, "some")
    unknown = error_from_json(b'{"type": "ValueError", "message": "text"}')
    assert (type(unknown), str(unknown)) == (TxlError, "text")
