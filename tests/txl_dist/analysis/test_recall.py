"""The recall probe on models whose reach is known, and its command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.commands import run_txl
from tests.support.exported_model import export_small_model
from tests.support.small_models import VOCAB_SIZE, small_model
from txl_dist.analysis import recall
from txl_dist.analysis.recall import NUM_SEQUENCES, SPAN, measure_recall, place_spans
from txl_dist.analysis.windows import WindowScorer
from txl_dist.errors import ConfigError

DISTANCES = (16, 20, 30)


class CopyScorer(WindowScorer):
    """Loss 0.5 for tokens that occurred at most `tgt_len` tokens before, else 2."""

    def last_nats(self, token_BN: Tensor, *, num_scored: int = 1) -> Tensor:
        num_tokens = token_BN.shape[1]
        nats = torch.full((len(token_BN), num_scored), 2.0)
        for row, token_N in enumerate(token_BN):
            for number in range(num_scored):
                place = num_tokens - num_scored + number
                seen = token_N[max(0, place - self.tgt_len) : place]
                nats[row, number] = 0.5 if token_N[place] in seen else 2.0
        return nats


@pytest.mark.parametrize(("reach", "expected"), [(15, 0), (16, 16), (29, 20), (30, 30)])
def test_the_reach_of_a_copying_model_is_found(
    reach: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_BN, _ = recall.random_text(30, 1000, seed=1, excluded=[])
    # Ids above those of the texts, so that only the first occurrence holds a token of the span.
    texts = text_BN, 1000 + np.arange(NUM_SEQUENCES * SPAN).reshape(NUM_SEQUENCES, SPAN)
    monkeypatch.setattr(recall, "random_text", lambda *_, **__: texts)
    scorer = CopyScorer(model=small_model(), tgt_len=reach)
    result = measure_recall(scorer, DISTANCES, seed=1, batch_windows=5)
    assert result.control_nats == 2
    assert result.reach == expected
    for row in result.rows:
        gain = 1.5 if row.distance <= reach else 0.0
        assert (row.gain, row.low, row.high, row.share) == (gain, gain, gain, gain / 2)


def test_control_and_distances_differ_in_the_first_occurrence_only() -> None:
    text_BN, span_BX = recall.random_text(30, VOCAB_SIZE, seed=1, excluded=[3, 4])
    assert not np.isin(text_BN, [3, 4]).any()
    control_BN = place_spans(text_BN, span_BX, None)
    repeated_BN = place_spans(text_BN, span_BX, 20)
    num_tokens = 2 * SPAN + 30
    first = slice(num_tokens - SPAN - 20, num_tokens - 20)
    assert text_BN.shape == (NUM_SEQUENCES, num_tokens)
    assert (repeated_BN[:, first] == span_BX).all()
    assert (repeated_BN[:, -SPAN:] == span_BX).all()
    repeated_BN[:, first] = text_BN[:, first]
    assert (repeated_BN == control_BN).all()


def test_a_model_gains_nothing_from_tokens_that_it_cannot_see() -> None:
    scorer = WindowScorer(model=small_model(mem_len=0).float(), tgt_len=20)
    result = measure_recall(scorer, DISTANCES, seed=1, batch_windows=7)
    assert result.rows[0].gain != 0
    assert [row.gain for row in result.rows[2:]] == [0]


@pytest.mark.parametrize("distances", [[15], [20, 16], [16, 16]])
def test_impossible_distances_are_refused(distances: list[int]) -> None:
    scorer = WindowScorer(model=small_model(), tgt_len=8)
    with pytest.raises(ConfigError, match="rising numbers of at least 16 tokens"):
        measure_recall(scorer, distances, seed=0, batch_windows=1)


@pytest.mark.parametrize("kind", ["compressive", "tokens"])
def test_another_kind_of_memory_is_probed_too(dataset: Path, tmp_path: Path, kind: str) -> None:
    """Beyond its segment of 12 tokens the model sees the text through its memory only."""
    model = export_small_model(tmp_path / "model", dataset, memory=kind)
    code, output = run_txl("bench", "recall", model, "--distances", "16,30", "--json")
    content = json.loads(output)
    assert (code, [row["distance"] for row in content["rows"]]) == (0, [16, 30])
    assert content["rows"][0]["gain"] != 0


def test_the_command_prints_a_table_or_one_object(dataset: Path, tmp_path: Path) -> None:
    model = export_small_model(tmp_path / "model", dataset)
    small = "--distances", "16,30"
    code, output = run_txl("bench", "recall", model, *small)
    assert code == 0, output
    assert "at most 36 tokens of context" in output
    code, output = run_txl("bench", "recall", model, *small, "--json", "--mem-len", 3)
    content = json.loads(output)
    assert (code, content["mem_len"], content["text"]) == (0, 3, "random tokens")
    assert [row["distance"] for row in content["rows"]] == [16, 30]
    code, output = run_txl("bench", "recall", model, "--distances", "5")
    assert (code, "would overlap" in output) == (2, True)
