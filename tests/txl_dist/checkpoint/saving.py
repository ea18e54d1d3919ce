"""Checkpoints of a tiny model without an engine, for tests that load or damage them."""

import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from data_pipeline.tokenizers import ByteTokenizer
from txl_dist.checkpoint.checkpoints import CheckpointHeader, Checkpoints, Save
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.tensors import Fragment, Snapshot
from txl_dist.errors import TxlError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.scores import StepScore
from txl_dist.training.state import TrainState

NUM_LANES = 3
STATES = ("exp_avg", "exp_avg_sq")
BEST = StepScore(step=1, nats=2.5, tokens_scored=1, split="valid", max_tokens=None)
CONFIG = ModelConfig(vocab_size=257, n_layer=2, d_model=6, n_head=3, d_head=2, d_inner=7, mem_len=5)
_TOKENIZER = ByteTokenizer()
HEADER = CheckpointHeader(
    written_by="tests",
    run_id="0" * 32,
    attempt=1,
    model=asdict(CONFIG),
    run={
        "data.num_lanes": 3, "data.lanes_per_step": 1, "data.tgt_len": 4, "data.reset": "document"
    },
    tokenizer_json=_TOKENIZER.to_json(),
    tokenizer_digest=_TOKENIZER.digest,
    data_digest="0" * 64,
    vocab_size=_TOKENIZER.vocab_size,
    zero_stage=1,
    num_lanes=NUM_LANES,
)  # fmt: skip


def leave(kind: str, tensor: torch.Tensor) -> None:
    """Save the tensors unchanged."""


def save(
    run: Path,
    *,
    step: int,
    best: StepScore | None = BEST,
    change: Callable[[str, torch.Tensor], None] = leave,
) -> Path:
    """Save a checkpoint whose tensors are a function of `step`, changed by `change`."""
    state = TrainState(step=step, position=4 * step, best=best)
    return save_on_one_rank(run, state, snapshot(step, change=change))


def save_on_one_rank(run: Path, state: TrainState, tensors: Snapshot) -> Path:
    """Save as a run of one rank does."""
    directory = CheckpointDirectory(run)
    directory.open()
    save = Save(
        save_id=uuid.uuid4().hex,
        state=state.model_dump(mode="json"),
        rank=0,
        num_ranks=1,
        timeout_seconds=60,
    )
    try:
        path = Checkpoints(directory).save(save, tensors, HEADER)
    except TxlError:
        directory.remove_staging(save.save_id)
        raise
    assert path is not None
    return path


def snapshot(step: int, *, change: Callable[[str, torch.Tensor], None] = leave) -> Snapshot:
    """All tensors of a run on one rank."""
    fragments = fragments_of(step)
    memory_of_lane = {lane: memory(step, lane) for lane in range(NUM_LANES)}
    change("weights", fragments[1].master)
    change("optimizer", fragments[1].states["exp_avg_sq"])
    change("memory", memory_of_lane[1]["state"])
    return Snapshot(fragments, memory_of_lane.items())


def fragments_of(step: int) -> list[Fragment]:
    """Whole parameters, with optimizer states that differ from each other."""
    return [whole(name, p.detach()) for name, p in model(step).named_parameters()]


def model(step: int) -> TransformerXL:
    return TransformerXL(CONFIG, seed=step)


def memory(step: int, lane: int) -> dict[str, torch.Tensor]:
    """Any tensors with names: what they mean is known to the kind of memory only."""
    return {"state": torch.full((3, 4), step + lane / 8), "count": torch.tensor(float(step))}


def whole(name: str, parameter: torch.Tensor) -> Fragment:
    flat = parameter.reshape(-1).clone()
    states = {state: flat * (number + 2) for number, state in enumerate(STATES)}
    return Fragment(name, tuple(parameter.shape), 0, flat, states)
