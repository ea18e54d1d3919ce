"""Strict YAML: every value that is written is read back equal."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from txl_dist.config.strict_yaml import dump_yaml, read_yaml

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
words = _text | st.sampled_from(["no", "1e3", "010", "1:30", "null", "~", "a: b", "# x", "<<", "é"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(words, values, max_size=4))
def test_written_yaml_is_read_back_equal(value: dict[str, Any]) -> None:
    document = read_yaml(dump_yaml(value))
    assert document.problems == []
    assert json.dumps(document.value if value else {}) == json.dumps(value)
