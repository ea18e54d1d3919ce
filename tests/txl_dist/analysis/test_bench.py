"""`txl bench` at a small size: the figures of eval-speed belong together (speed is not checked, the
window path computes the operations it counts), and recall of models whose reach is known.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.commands import run_txl
from tests.support.exported_model import export_small_model
from tests.support.small_models import (
    MODERN,
    SHORT_AND_LONG,
    VOCAB_SIZE,
    random_text,
    small_model,
)
from txl_dist.analysis import bench
from txl_dist.analysis.bench import (
    NUM_SEQUENCES,
    SPAN,
    bench_eval_speed,
    measure_recall,
    place_spans,
)
from txl_dist.analysis.windows import WindowScorer
from txl_dist.errors import ConfigError
from txl_dist.model.flops import inference_flops, window_flops

CONTRACT = {"attention_length", "tgt_len", "ms_per_token_window", "ms_per_token_reuse", "ratio"}


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REUSE_TOKENS", 32)
    monkeypatch.setattr(bench, "LANES", {"cpu": 2})


def test_the_share_follows_from_times_and_operations() -> None:
    model = small_model(mem_len=9).float()
    (row,) = bench_eval_speed(model, attention_lengths=[20], tgt_len=8, rounds=3)
    assert row.ratio == row.ms_per_token_window / row.ms_per_token_reuse
    window = window_flops(model.config, window_len=20)
    with_memory = small_model(mem_len=20).config
    reuse = inference_flops(with_memory, num_lanes=2, tgt_len=8) / 16
    assert row.flops_ratio == window / reuse
    assert row.share_of_flops_ratio == row.ratio / row.flops_ratio
    assert row.holds == (0.8 <= row.share_of_flops_ratio <= 1.25)
    assert row.ms_per_token_reuse > 0


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "compressive"},
        {"memory": "tokens"},
        {"mem_len": 0, "distance_encoding": "absolute"},
        {"mem_len": 3, "same_length": True},
    ],
    ids=str,
)
def test_models_that_cannot_be_compared_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is no such memory"):
        next(bench_eval_speed(small_model(**options), attention_lengths=[9], tgt_len=4, rounds=1))


def test_eval_speed_prints_one_object_or_a_table(dataset: Path, tmp_path: Path) -> None:
    model = export_small_model(tmp_path / "model", dataset)
    words = "--attention-length", "48,800", "--rounds", 1, "--tgt-len", 32, "--checkpoint", model
    code, output = run_txl("bench", "eval-speed", *words, "--json")
    assert code == 0, output
    content = json.loads(output)
    assert all(set(row) >= CONTRACT for row in content["rows"])
    assert [row["attention_length"] for row in content["rows"]] == [48, 800]
    assert [row["paper_ratio"] for row in content["rows"]] == [None, 363]
    assert (content["model"]["name"], content["threads"]) == (str(model), 1)
    code, output = run_txl("bench", "eval-speed", "--attention-length", 30, *words[2:])
    assert code == 0, output
    assert all(text in output for text in (str(model), "0.8 to 1.25"))
    for wrong in ("", "x", "0", "99999999999"):
        code, output = run_txl("bench", "eval-speed", "--attention-length", wrong)
        assert (code, "separated by commas" in output) == (2, True)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n_layer": 1},
    {"n_layer": 3, "pre_lnorm": True, "untie_r": True},
    {"cutoffs": (4, 9), "d_embed": 3},
    {"distance_encoding": "shaw", "clamp_len": 4},
    {"distance_encoding": "rotary"},
    {"distance_encoding": "alibi"},
    {"distance_encoding": "absolute"},
    *MODERN.values(),
    SHORT_AND_LONG,
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formula_equals_torchs_counter(options: dict[str, Any]) -> None:
    model = small_model(attention="reference", **({"mem_len": 0} | options))
    scorer = WindowScorer(model=model, tgt_len=9)
    with FlopCounterMode(display=False) as counted:
        scorer.last_nats(random_text(1, 10) % 4)
    assert counted.get_total_flops() == window_flops(model.config, window_len=9)


# --- recall ---------------------------------------------------------------------------------------

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
    text_BN, _ = bench.random_text(30, 1000, seed=1, excluded=[])
    # Ids above those of the texts, so that only the first occurrence holds a token of the span.
    texts = text_BN, 1000 + np.arange(NUM_SEQUENCES * SPAN).reshape(NUM_SEQUENCES, SPAN)
    monkeypatch.setattr(bench, "random_text", lambda *_, **__: texts)
    scorer = CopyScorer(model=small_model(), tgt_len=reach)
    result = measure_recall(scorer, DISTANCES, seed=1, batch_windows=5)
    assert result.control_nats == 2
    assert result.reach == expected
    for row in result.rows:
        gain = 1.5 if row.distance <= reach else 0.0
        assert (row.gain, row.low, row.high, row.share) == (gain, gain, gain, gain / 2)


def test_control_and_distances_differ_in_the_first_occurrence_only() -> None:
    text_BN, span_BX = bench.random_text(30, VOCAB_SIZE, seed=1, excluded=[3, 4])
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


def test_recall_prints_a_table_or_one_object(dataset: Path, tmp_path: Path) -> None:
    model = export_small_model(tmp_path / "model", dataset)
    small = "--distances", "16,30"
    code, output = run_txl("bench", "recall", model, *small)
    assert code == 0, output
    assert "at most 36 tokens of context" in output
    code, output = run_txl("bench", "recall", model, *small, "--json", "--mem-len", 3)
    content = json.loads(output)
    assert (code, content["mem_len"], content["text"]) == (0, 3, "random tokens")
    assert [row["distance"] for row in content["rows"]] == [16, 30]
    code, output = run_txl("bench", "recall", model, "--distances", "99999999999")
    assert (code, "--distances '99999999999': expected" in output) == (2, True)
    code, output = run_txl("bench", "recall", model, "--distances", "5")
    assert (code, "would overlap" in output) == (2, True)
