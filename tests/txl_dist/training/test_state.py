"""TrainState is read from a checkpoint's manifest, or refused with the wrong entry's name.

The count of lost and repeated tokens notices a phase that does not continue its epoch.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.txl_dist.checkpoint.saving import BEST, save
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.errors import CheckpointError
from txl_dist.training.state import (
    CorpusEntry,
    Phase,
    TrainState,
    count_tokens,
    load_state,
    phases_from,
)


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


def phase(num_lanes: int, **fields: object) -> Phase:
    corpus = CorpusEntry(name="data", digest="0" * 64, tokens=20, weight=1.0)
    return Phase.model_validate({"corpora": (corpus,), "num_lanes": num_lanes, **fields})


def continued(**fields: object) -> Phase:
    """Two lanes of ten tokens have read three each; three lanes continue."""
    return phase(3, position=3, **fields)


@pytest.mark.parametrize(
    ("after", "lost", "twice"),
    [
        (continued(unread=((3, 10), (13, 20))), 0, 0),
        (continued(unread=((5, 10), (13, 20))), 0, 0),  # fewer than the tail of three lanes
        (continued(unread=((6, 10), (13, 20))), 3, 0),
        (continued(unread=((2, 10), (13, 20))), 0, 1),
        (continued(first_epoch=1), 14, 0),
        (continued(), 0, 6),
    ],
)
def test_lost_and_repeated_tokens_are_counted(after: Phase, lost: int, twice: int) -> None:
    state = TrainState(position=3, tokens=6, phases=(phase(2), after))
    count = count_tokens((phase(2),), state, after.plan())
    assert (count.lost, count.twice, count.targets_missing) == (lost, twice, 0)
    assert count.line.startswith(f"tokens lost by this resume {lost}, read twice {twice} | ")


def test_a_new_number_of_lanes_continues_the_epoch() -> None:
    phases = phases_from((phase(2),), phase(3), position=3, context_tokens=4)
    assert phases[-1] == continued(unread=((3, 10), (13, 20)), context_tokens=4)


def test_targets_that_were_not_trained_on_are_counted() -> None:
    state = TrainState(position=3, tokens=4, phases=(phase(2),))
    assert count_tokens((phase(2),), state, phase(2).plan()).targets_missing == 2


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_targets_of_lanes_that_are_a_segment_ahead_count(turn: int) -> None:
    """Five lanes of four tokens each; all have read two, and those of earlier turns a third."""
    phases = (phase(5),)
    tokens = 5 * 2 + sum(len(range(earlier, 5, 3)) for earlier in range(turn))
    state = TrainState(position=2, turn=turn, tokens=tokens, phases=phases)
    assert count_tokens(phases, state, phases[0].plan(num_turns=3)).targets_missing == 0
