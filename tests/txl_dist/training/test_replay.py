"""Replay: the memory after a change of lanes or `mem_len` is that of an uninterrupted reading."""

import re
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.order import Remainder
from data_pipeline.streams.segment_stream import SegmentStream
from tests.support.running_mean import overrides_of
from tests.support.small_models import VOCAB_SIZE, small_model
from tests.support.token_sources import random_corpus
from tests.support.training_runs import NO_EVALUATION, TinyRuns, losses, metrics, refusal, train
from txl_dist.model.memory import memory_kind

CONSTANT_WEIGHTS = ("optimizer.lr=1.0e-30", "optimizer.min_lr=0", "optimizer.warmup_steps=0")
LENGTHS = [[17, 40], [9], [30, 22, 14]]
N_LAYER, MEM_LEN, TGT_LEN = 2, 7, 3
CONTEXT_SEGMENTS = N_LAYER * 3  # ceil(7 / 3)


def memory_after(num_segments: int, reset: str, **options: Any) -> list[torch.Tensor]:
    """The memory of 4 lanes that begin inside an epoch, after a replay of some segments."""
    plan = LanePlan(
        num_tokens=132, num_lanes=4, tgt_len=TGT_LEN, start=20,
        remainder=Remainder(((50, 70), (80, 132)), context_tokens=num_segments * TGT_LEN),
    )  # fmt: skip
    model = small_model(n_layer=N_LAYER, mem_len=MEM_LEN, **options)
    source = random_corpus(LENGTHS, vocab_size=VOCAB_SIZE, seed=1)
    memory = model.empty_memory(4)
    with SegmentStream(source, plan, lanes=range(4), reset=reset, position=20) as stream:  # type: ignore[arg-type]
        for segment in stream.segments_before(num_segments):
            columns = (torch.from_numpy(array) for array in (segment.input, segment.age))
            _, memory = model.hidden(*columns, memory)
    return [tensor.detach() for tensor in memory.tensors().values()]


@pytest.mark.parametrize("reset", ["document", "stream"])
def test_the_context_gives_the_memory_of_the_whole_epoch_before(reset: str) -> None:
    whole_epoch = memory_after(132 // TGT_LEN, reset)
    assert_close(memory_after(CONTEXT_SEGMENTS, reset), whole_epoch)
    if reset == "stream":
        with pytest.raises(AssertionError):
            assert_close(memory_after(N_LAYER, reset), whole_epoch)


def test_the_context_gives_a_compressive_memory_too() -> None:
    """Its blocks of one segment are the same ones wherever the reading begins."""
    options = {"memory": "compressive", "compression_rate": TGT_LEN, "compressed_len": 2}
    config = small_model(n_layer=N_LAYER, mem_len=MEM_LEN, **options).config
    num_tokens = memory_kind(config).receptive_tokens(TGT_LEN)
    assert num_tokens > CONTEXT_SEGMENTS * TGT_LEN
    whole_epoch = memory_after(132 // TGT_LEN, "stream", **options)
    assert_close(memory_after(num_tokens // TGT_LEN, "stream", **options), whole_epoch)
    with pytest.raises(AssertionError):
        assert_close(memory_after(CONTEXT_SEGMENTS, "stream", **options), whole_epoch)


@pytest.mark.slow
def test_a_longer_memory_is_what_it_would_be_if_it_had_always_been_longer(tiny: TinyRuns) -> None:
    """With constant weights the losses of the runs are comparable. With `init_std` attention and
    memory matter: a memory that was not replayed changes losses by 1 %.
    """
    settings = (
        NO_EVALUATION, *CONSTANT_WEIGHTS, "training.checkpoint_interval_steps=5",
        "model.init_std=0.3",
    )  # fmt: skip
    for name, mem_len, num_steps in [
        ("long", 10, 10), ("short", 4, 10), ("changed", 4, 5), ("changed", 10, 10),
    ]:  # fmt: skip
        tiny.trained(
            tiny.path / name, *settings,
            f"model.mem_len={mem_len}", f"training.num_steps={num_steps}",
            allow_change=("model.mem_len", "training.num_steps"), num_ranks=1,
        )  # fmt: skip
    changed = losses(tiny.path / "changed")
    for name, steps in [("short", range(1, 6)), ("long", range(6, 11))]:
        expected = losses(tiny.path / name)
        for step in steps:
            assert changed[step] == pytest.approx(expected[step], rel=1e-6), (name, step)
    assert losses(tiny.path / "long")[6] != pytest.approx(losses(tiny.path / "short")[6], rel=1e-3)


def test_lanes_change_in_mid_run_and_the_log_counts_the_tokens(tiny: TinyRuns) -> None:
    settings = (NO_EVALUATION, "training.checkpoint_interval_steps=4")
    run = tiny.path / "run"
    for num_lanes, tgt_len, num_steps in [(5, 3, 4), (8, 4, 8), (2, 4, 12)]:
        overrides = (
            f"data.num_lanes={num_lanes}", f"data.tgt_len={tgt_len}",
            f"training.num_steps={num_steps}",
        )  # fmt: skip
        if num_steps > 4:
            assert tiny.ranks(1).run(train, tiny.spec(run, *settings, *overrides)) == [4]
            assert "--allow-change data.num_lanes" in refusal(run)
        allowed = ("data.num_lanes", "data.tgt_len", "training.num_steps")
        tiny.trained(run, *settings, *overrides, allow_change=allowed, num_ranks=1)
    log = (run / "logs" / "rank-0.log").read_text()
    assert (
        re.findall(r"tokens lost by this resume (\d+), read twice (\d+)", log) == [("0", "0")] * 2
    )
    assert re.findall(r"replayed (\d+) tokens per lane, unscored", log) == ["16", "16"]
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line["memory_valid"] > 0.3 for line in lines if line["step"] in (5, 9))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("compressive", ("data.num_lanes=8", "data.tgt_len=6", "model.mem_len=10")),
        # No number of tokens would rebuild what is written, so the lanes stay.
        ("tokens", ("data.tgt_len=6",)),
    ],
)
def test_lanes_and_lengths_change_with_other_kinds_of_memory(
    tiny: TinyRuns, kind: str, change: tuple[str, ...]
) -> None:
    allowed = ("training.num_steps", "data.num_lanes", "data.tgt_len", "model.mem_len")
    # Segments of 3 and 6 tokens are whole blocks.
    rate = ("model.compression_rate=3",) if kind == "compressive" else ()
    for more in (("training.num_steps=2",), ("training.num_steps=5", *change)):
        overrides = (NO_EVALUATION, "optimizer.warmup_steps=0", *overrides_of(kind), *rate, *more)
        tiny.trained(tiny.path, *overrides, allow_change=allowed, num_ranks=1)
    log = (tiny.path / "logs" / "rank-0.log").read_text()
    assert "tokens lost by this resume 0, read twice 0" in log
    assert ("tokens per lane, unscored" in log) == (kind == "compressive"), "read again"
    assert [*losses(tiny.path)] == [1, 2, 3, 4, 5]
