import pytest

from data_pipeline.storage import strict_json


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    one, two = {"a": 1, "b": {"c": "é", "d": []}}, {"b": {"d": [], "c": "é"}, "a": 1}
    assert strict_json.canonical(one) == '{"a":1,"b":{"c":"\\u00e9","d":[]}}'
    assert strict_json.sha256_of(one) == strict_json.sha256_of(two)
    assert strict_json.sha256_of(one) != strict_json.sha256_of({**one, "a": 2})


@pytest.mark.parametrize("text", ['{"k": 1, "k": 1}', b'[{"a": {"k": 1, "l": 2, "k": 3}}]'])
def test_a_key_twice_is_refused_at_any_depth(text: str | bytes) -> None:
    with pytest.raises(ValueError, match='key "k" twice in one object'):
        strict_json.parse(text)
