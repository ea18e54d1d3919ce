"""`txl bench eval-speed` at a small size: its figures belong together. Speed is not checked. The
window path computes the operations it counts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.support.commands import run_txl
from tests.support.exported_model import export_small_model
from tests.support.small_models import MODERN, SHORT_AND_LONG, random_text, small_model
from txl_dist.analysis import eval_speed
from txl_dist.analysis.eval_speed import bench_eval_speed
from txl_dist.analysis.windows import WindowScorer
from txl_dist.errors import ConfigError
from txl_dist.model.flops import inference_flops, window_flops

CONTRACT = {"attention_length", "tgt_len", "ms_per_token_window", "ms_per_token_reuse", "ratio"}


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_speed, "REUSE_TOKENS", 32)
    monkeypatch.setattr(eval_speed, "LANES", {"cpu": 2})


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


def test_the_command_prints_one_object_or_a_table(dataset: Path, tmp_path: Path) -> None:
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
def test_the_formula_equals_torchs_counter(options: dict[str, Any]) -> None:
    model = small_model(attention="reference", **({"mem_len": 0} | options))
    scorer = WindowScorer(model=model, tgt_len=9)
    with FlopCounterMode(display=False) as counted:
        scorer.last_nats(random_text(1, 10) % 4)
    assert counted.get_total_flops() == window_flops(model.config, window_len=9)
