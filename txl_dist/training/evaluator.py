"""The evaluation of a split during training.

build_evaluator          on all ranks, with the current weights, while training waits
build_worker_evaluation  on a worker, from checkpoints, while training continues
"""

from dataclasses import replace

import torch

from txl_dist.config.run_config import RunConfig
from txl_dist.evaluation.evaluate import (
    EvaluationResult,
    EvaluationSettings,
    evaluate_on_ranks,
    plan_evaluation,
)
from txl_dist.evaluation.scoring import Scorer
from txl_dist.runtime.world import World
from txl_dist.training.data import TrainingData
from txl_dist.training.engine import Engine
from txl_dist.training.loop import Evaluate


def build_evaluator(
    config: RunConfig, data: TrainingData, engine: Engine, world: World
) -> Evaluate | None:
    """A function that scores `data.evaluation` with the current weights; None if that is not done.

    If the run averages its weights, the average is scored.

    The split is opened and its chunks are planned here, once. Raises DataError if it has no target.
    """
    if data.evaluation is None or config.evaluation.on != "ranks":
        return None
    model = engine.model
    settings = EvaluationSettings(
        split=data.evaluation.name,
        mode="exact",
        tgt_len=config.data.tgt_len,
        mem_len=model.config.mem_len,
        clamp_len=model.config.clamp_len,
        same_length=model.config.same_length,
        reset=config.data.reset,
        max_tokens=config.evaluation.max_tokens,
        precision=config.precision,
    )
    scorer = Scorer(
        model=model,
        source=data.evaluation.open(),
        tgt_len=settings.tgt_len,
        reset=settings.reset,
        precision=settings.precision,
        batch_chunks=config.evaluation.batch_chunks,
        byte_counts_V=torch.from_numpy(data.tokenizer.token_bytes()),
    )
    chunks = plan_evaluation(scorer.source, settings, model.config)

    def evaluate(*, stop: object) -> EvaluationResult | None:
        world.activity.name = f"evaluation of split {settings.split}"
        with engine.averaged_weights(), engine.whole_model() as whole_model:
            whole_scorer = replace(scorer, model=whole_model)
            return evaluate_on_ranks(whole_scorer, chunks, settings, world=world, stop=stop)

    return evaluate
