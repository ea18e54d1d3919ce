"""Tiny training runs for tests: the config of configs/tiny.yaml on the test dataset."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import tests.support.running_mean  # noqa: F401  # registers a kind of memory in every rank
from tests.support.gloo_ranks import RankGroups
from txl_dist.checkpoint.directory import resolve_checkpoint
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.checkpoint.tensors import Weights, load_memory, load_model
from txl_dist.config.config_file import load_run_config
from txl_dist.errors import TxlError
from txl_dist.runtime.world import World
from txl_dist.training.loop import Trainer
from txl_dist.training.rank import build_trainer, train_rank
from txl_dist.training.scores import FOLDER, StepScore
from txl_dist.training.spec import RunDirectory, TrainSpec
from txl_dist.training.start import Start
from txl_dist.training.step import TrainStep

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
NO_EVALUATION = "evaluation.split=null"
ZERO = {
    **{str(stage): (f"deepspeed.zero_stage={stage}",) for stage in (0, 1, 2, 3)},
    # By default DeepSpeed keeps parameters this small whole on every rank.
    "3-all-spread": (
        "deepspeed.zero_stage=3",
        "deepspeed.extra={zero_optimization: {stage3_param_persistence_threshold: 0}}",
    ),
}
"""Every ZeRO stage, as overrides."""
TURNS = ("data.num_lanes=9", "data.lanes_per_step=3")
"""Each step reads every third lane."""
DROPOUT = ("model.dropout=0.1", "model.dropatt=0.2")


def tiny_spec(dataset: Path, run: Path, *overrides: str, **options: Any) -> TrainSpec:
    """A spec of 20 steps on 5 lanes; `overrides` as on the command line."""
    data_overrides = [f"data.path={dataset}", f"directory={run}", *overrides]
    return TrainSpec(config=load_run_config(TINY, data_overrides), **options)


def train_words(
    dataset: Path, run: Path, *words: object, on: str = "processes", num_ranks: int | str = 2
) -> tuple[object, ...]:
    """The words of `txl train` for a tiny run; `words` are settings and options."""
    paths = (f"data.path={dataset}", f"directory={run}")
    return ("train", TINY, *paths, *words, "--on", on, "--ranks", num_ranks)


def trained(
    ranks: RankGroups, dataset: Path, run: Path, *overrides: str, num_ranks: int = 2, **options: Any
) -> Path:
    """Train a tiny run to its end on a group of ranks; returns its directory."""
    spec = tiny_spec(dataset, run, *overrides, **options)
    assert ranks(num_ranks).run(train, spec) == [0] * num_ranks
    return run


def train(world: World, spec: TrainSpec) -> int:
    """Run a spec as one rank of a group; returns 0, or the exit code of its TxlError."""
    try:
        train_rank(spec, world)
    except TxlError as error:
        return error.exit_code
    return 0


@dataclass(frozen=True)
class TinyRuns:
    """Tiny runs of one test on the test dataset; a run's name is that of its directory."""

    ranks: RankGroups
    dataset: Path
    path: Path

    def spec(self, run: str | Path, *overrides: str, **options: Any) -> TrainSpec:
        return tiny_spec(self.dataset, self.path / run, *overrides, **options)

    def trained(self, run: str | Path, *overrides: str, num_ranks: int = 2, **options: Any) -> Path:
        directory = self.path / run
        return trained(
            self.ranks, self.dataset, directory, *overrides, num_ranks=num_ranks, **options
        )


@contextmanager
def opened_trainer(world: World, spec: TrainSpec) -> Iterator[Trainer]:
    """One rank's trainer of a run, before its first step."""
    directory = RunDirectory(spec.run_path)
    directory.create()
    with ExitStack() as stack:
        yield build_trainer(Start.open(spec, world, directory, stack))


def train_some(world: World, spec: TrainSpec, *, num_steps: int) -> int:
    """Train `num_steps` steps of a longer run, which then fails."""
    original = TrainStep.compute

    def failing(self: TrainStep, *args: Any, **options: Any) -> Any:
        if options["step"] > num_steps:
            raise TxlError("the end of this part")
        return original(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "compute", failing)
        return train(world, spec)


def saved_last_step(run: Path) -> int:
    """The last step of a run, of which there must be a checkpoint."""
    step = max(losses(run))
    assert (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
    return step


def refusal(run: Path) -> str:
    """The message of the newest error in rank 0's log."""
    log = (run / "logs" / "rank-0.log").read_text()
    return re.split(r"^[\d:]{8} \w+Error: ", log, flags=re.MULTILINE)[-1]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """Training loss by step; every step must be there once."""
    by_step: dict[int, float] = {}
    for line in metrics(run):
        if "loss" in line:
            assert line["step"] not in by_step, f"step {line['step']} twice in {run}"
            by_step[line["step"]] = line["loss"]
    return by_step


def lane_memories(run: Path, num_lanes: int) -> dict[int, dict[str, Tensor]]:
    """The memory of every lane by name, of a run's newest checkpoint."""
    checkpoint = resolve_checkpoint(run)
    return load_memory(checkpoint, load_checkpoint_manifest(checkpoint), range(num_lanes))


def norms(run: Path) -> list[float]:
    """Gradient norms by step, before clipping."""
    return [line["gradient_norm"] for line in metrics(run)]


def weights_at(run: Path, step: int, which: Weights = "last") -> dict[str, Tensor]:
    """The weights of a checkpoint by name."""
    model, *_ = load_model(RunDirectory(run).checkpoints.at(step), weights=which)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def score_of_step(run: Path, step: int) -> StepScore:
    return StepScore.model_validate_json((run / FOLDER / f"step-{step:08d}.json").read_bytes())
