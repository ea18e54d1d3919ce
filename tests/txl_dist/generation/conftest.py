import pytest
from torch import Tensor

from txl_dist.generation import generate


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Records the logits [V] that each token is sampled from."""
    seen, next_tokens = [], generate.next_tokens

    def recording_next_tokens(logits_BV: Tensor, *how) -> list[int]:
        seen.extend(logits_BV)
        return next_tokens(logits_BV, *how)

    monkeypatch.setattr(generate, "next_tokens", recording_next_tokens)
    return seen
