"""`txl bench eval-speed` at a small size: its figures belong together. Speed is not checked. The
window path computes the loss of one segment of L tokens, and the operations it counts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from tests.support.commands import run_txl
from tests.support.exported_model import export_small_model
from tests.support.small_models import MODERN, SHORT_AND_LONG, random_text, small_model
from txl_dist.bench import eval_speed
from txl_dist.bench.eval_speed import WindowReader, bench_eval_speed
from txl_dist.model.flops import inference_flops, window_flops

CONTRACT = {
    "attention_length",
    "tgt_len",
    "ms_per_token_window",
    "ms_per_token_reuse",
    "ratio",
}


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_speed, "REUSE_TOKENS", 32)
    monkeypatch.setattr(eval_speed, "LANES", {"cpu": 2})
    monkeypatch.setattr(eval_speed, "BLOCK_LEN", {"cpu": 6})


def test_the_share_follows_from_times_and_operations() -> None:
    model = small_model(mem_len=9).float()
    (row,) = bench_eval_speed(model, attention_lengths=[20], tgt_len=8, rounds=3)
    assert row.ratio == row.ms_per_token_window / row.ms_per_token_reuse
    window = window_flops(model.config, window_len=20, block_len=6)
    with_memory = small_model(mem_len=20).config
    reuse = inference_flops(with_memory, num_lanes=2, tgt_len=8) / 16
    assert row.flops_ratio == window / reuse
    assert row.share_of_flops_ratio == row.ratio / row.flops_ratio
    assert row.holds == (0.8 <= row.share_of_flops_ratio <= 1.25)
    assert row.ms_per_token_reuse > 0


@pytest.mark.parametrize(
    "options",
    [{"mem_len": 0, "distance_encoding": "absolute"}, {"mem_len": 3, "same_length": True}],
    ids=str,
)
def test_models_that_cannot_be_compared_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"allows no memory|same_length"):
        next(bench_eval_speed(small_model(**options), attention_lengths=[9], tgt_len=4, rounds=1))


def test_json_has_the_keys_of_the_contract(dataset: Path, tmp_path: Path) -> None:
    model = export_small_model(tmp_path / "model", dataset)
    words = "--attention-length", "48,800", "--rounds", 1, "--tgt-len", 32, "--checkpoint", model
    code, output = run_txl("bench", "eval-speed", *words, "--json")
    assert code == 0, output
    content = json.loads(output)
    assert all(set(row) >= CONTRACT for row in content["rows"])
    assert [row["attention_length"] for row in content["rows"]] == [48, 800]
    assert [row["paper_ratio"] for row in content["rows"]] == [None, 363]
    assert (content["model"]["name"], content["threads"]) == (str(model), 1)


def test_the_table_names_a_checkpoint_and_the_limit(dataset: Path, tmp_path: Path) -> None:
    model = export_small_model(tmp_path / "model", dataset)
    words = "--attention-length", 30, "--rounds", 1, "--checkpoint", model
    code, output = run_txl("bench", "eval-speed", *words)
    assert code == 0, output
    assert str(model) in output
    assert "0.8 to 1.25" in output
    for wrong in ("", "x", "0"):
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
@pytest.mark.parametrize("block_len", [1, 4, 20])
def test_the_window_path_equals_one_segment(options: dict[str, Any], block_len: int) -> None:
    model = small_model(seed=1, **({"mem_len": 0} | options))
    reader = WindowReader(model, window_len=9, num_windows=2, block_len=block_len)
    for seed in (1, 2):  # the second window must not see the first
        text_BN = random_text(2, 10, seed=seed)
        age_BT = torch.arange(9).expand(2, 9)
        nats_BT, _ = model(text_BN[:, :-1], text_BN[:, 1:], age_BT, model.empty_memory(2))
        assert_close(reader.last_nats(text_BN[:, :-1], text_BN[:, -1]), nats_BT[:, -1])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("block_len", [4, 9])
def test_the_formula_equals_torchs_counter(options: dict[str, Any], block_len: int) -> None:
    model = small_model(attention="reference", **({"mem_len": 0} | options))
    reader = WindowReader(model, window_len=9, num_windows=1, block_len=block_len)
    text_BN = random_text(1, 10) % 4
    with FlopCounterMode(display=False) as counted:
        reader.last_nats(text_BN[:, :-1], text_BN[:, -1])
    flops = window_flops(model.config, window_len=9, block_len=block_len)
    assert counted.get_total_flops() == flops


def test_a_window_of_one_token_costs_as_much_as_a_segment_of_one() -> None:
    config = small_model(mem_len=0).config
    assert window_flops(config, window_len=1, block_len=8) == inference_flops(
        config, num_lanes=1, tgt_len=1
    )
