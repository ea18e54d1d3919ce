"""The value of --ranks."""

import pytest

from txl_dist.errors import ConfigError
from txl_dist.launch.launcher import RankRange


def test_a_number_is_fixed_and_a_range_is_elastic() -> None:
    assert RankRange.parse("4") == RankRange(4, 4)
    assert not RankRange.parse("4").is_elastic
    assert RankRange.parse("2:8") == RankRange(2, 8)
    assert RankRange.parse("2:8").is_elastic
    assert str(RankRange(2, 8)) == "2:8"
    assert str(RankRange(3, 3)) == "3"


@pytest.mark.parametrize("text", ["", "0", "0:2", "-1", "2:", ":2", "3:2", "1:2:3", "two", "٢"])
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a number such as 4, or a range such as 2:8"):
        RankRange.parse(text)
