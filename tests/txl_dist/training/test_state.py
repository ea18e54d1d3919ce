"""TrainState is read from a checkpoint's manifest, or refused with the wrong entry's name."""

from pathlib import Path
from typing import Any

import pytest

from tests.txl_dist.checkpoint.saving import BEST, save
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.errors import CheckpointError
from txl_dist.training.state import TrainState, load_state


def test_the_state_of_a_checkpoint_equals_the_saved_one(tmp_path: Path) -> None:
    path = save(tmp_path, step=3)
    expected = TrainState(step=3, position=12, best=BEST)
    assert load_state(path, load_checkpoint_manifest(path)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": -1}, "state.position: Input should be greater than or equal to 0"),
        ({"tokens": "7"}, "state.tokens: Input should be a valid integer"),
        ({"learning_rate": 0.1}, "state.learning_rate: Extra inputs are not permitted"),
        ({"unreported": [float("nan"), 0, 0]}, "state.unreported.0: Input should be a finite"),
    ],
)
def test_an_invalid_state_is_a_checkpoint_error(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = save(tmp_path, step=3)
    manifest = load_checkpoint_manifest(path)
    damaged = manifest.model_copy(update={"state": manifest.state | change})
    with pytest.raises(CheckpointError) as caught:
        load_state(path, damaged)
    assert message in str(caught.value)
    assert str(path / "manifest.json") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "improves"),
    [
        ({"nats": 2.4}, True),
        ({"nats": 2.6}, False),
        ({"nats": 2.6, "max_tokens": 5}, True),
        ({"nats": 2.6, "split": "test"}, True),
        ({"nats": 2.6, "data_digest": "1" * 64}, True),
    ],
)
def test_only_scores_of_the_same_text_are_compared(change: dict[str, Any], improves: bool) -> None:
    assert (BEST.model_copy(update=change).gain_over(BEST) is not None) is improves
    assert BEST.gain_over(None) == 0
