"""A SequenceReader reads a text in any segments as it is read in one pass."""

import pytest
import torch
from torch.testing import assert_close

from tests.support.small_models import random_text, read_stream, small_model
from txl_dist.model.vocabulary import IGNORED
from txl_dist.sequence import SequenceReader

TGT_LEN = 4


@pytest.mark.parametrize("num_tokens", [3, 9, 13])
def test_rows_have_the_losses_of_one_pass_over_the_text(num_tokens: int) -> None:
    model, text_BN = small_model(), random_text(2, num_tokens)
    expected_BN, _ = read_stream(model, text_BN, tgt_len=TGT_LEN)
    reader = SequenceReader(model, state=model.inference_state(2), tgt_len=TGT_LEN)
    segments = reader.read_rows(text_BN[:, :-1])
    nats = [reader.nats(hidden, text_BN[:, 1:][:, columns]) for columns, hidden in segments]
    assert_close(torch.cat(nats, dim=1), expected_BN)


def test_the_shorter_segment_is_the_first_one_on_request() -> None:
    model, text_BN = small_model(), random_text(1, 10)
    reader = SequenceReader(model, state=model.inference_state(1), tgt_len=TGT_LEN)
    columns = [columns for columns, _ in reader.read_rows(text_BN, whole_last_segment=True)]
    assert [(each.start, each.stop) for each in columns] == [(0, 2), (2, 6), (6, 10)]


@pytest.mark.parametrize("encoding", ["absolute", "sinusoidal"])
def test_a_short_segment_is_computed_as_the_start_of_a_whole_one(encoding: str) -> None:
    model = small_model(distance_encoding=encoding, mem_len=0)
    text_BN = random_text(2, TGT_LEN + 1)
    age_BT = torch.arange(TGT_LEN).expand(2, -1)

    def nats(num_tokens: int) -> torch.Tensor:
        reader = SequenceReader(model, state=model.inference_state(2), tgt_len=TGT_LEN)
        target_BT = text_BN[:, 1 : num_tokens + 1]
        return reader.score(text_BN[:, :num_tokens], target_BT, age_BT[:, :num_tokens])

    assert nats(2).shape == (2, 2)
    assert_close(nats(2), nats(TGT_LEN)[:, :2])


def test_the_state_is_kept_between_segments_and_targets_may_be_missing() -> None:
    model, text_BN = small_model(), random_text(3, 2 * TGT_LEN + 1)
    expected_BN, _ = read_stream(model, text_BN, tgt_len=TGT_LEN)
    reader = SequenceReader(model, state=model.inference_state(3), tgt_len=TGT_LEN)
    age_BN = torch.arange(2 * TGT_LEN).expand(3, -1)
    first_BT = text_BN[:, 1 : TGT_LEN + 1]
    ignored_BT = torch.full_like(first_BT, IGNORED)
    nats_BT = reader.score(text_BN[:, :TGT_LEN], ignored_BT, age_BN[:, :TGT_LEN])
    assert not nats_BT.any()
    reader.select([2, 0], [0, 0])
    rows = text_BN[[2, 0]]
    nats_BT = reader.score(rows[:, TGT_LEN:-1], rows[:, TGT_LEN + 1 :], age_BN[:2, TGT_LEN:])
    assert_close(nats_BT, expected_BN[[2, 0], TGT_LEN:])
