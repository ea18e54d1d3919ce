"""`txl bench generate`: which figures it gives. Limits are not checked."""

from txl_dist.bench.generate import LIMIT, SHARES, bench_generate
from txl_dist.model.config import ModelConfig


def test_every_length_is_compared_with_the_shortest() -> None:
    config = ModelConfig(
        vocab_size=7, n_layer=1, d_model=4, n_head=1, d_head=4, d_inner=4, mem_len=3
    )
    figures = list(bench_generate(rounds=1, lengths=(5, 9, 300), config=config, long_memory=config))
    assert [figure.limit for figure in figures] == [None, LIMIT, LIMIT, None, *SHARES.values()]
    assert "after 300 tokens" in figures[2].name
    assert all(figure.value > 0 for figure in figures)
