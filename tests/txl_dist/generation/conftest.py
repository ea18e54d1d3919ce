import pytest
from torch import Tensor

from txl_dist.generation import batch_decoder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Records the logits [V] that each token is sampled from."""
    seen, next_token = [], batch_decoder.next_token

    def recording_next_token(logits_V: Tensor, *how) -> int:
        seen.append(logits_V)
        return next_token(logits_V, *how)

    monkeypatch.setattr(batch_decoder, "next_token", recording_next_token)
    return seen
