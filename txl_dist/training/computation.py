"""Builds what computes: the step, with model, engine and memory, and evaluation on the ranks."""

import logging
import math
from dataclasses import replace

import torch

from txl_dist.errors import ConfigError
from txl_dist.evaluation.job import EvaluationSettings, plan_evaluation
from txl_dist.evaluation.result import scored_text
from txl_dist.evaluation.scoring import Scorer, evaluate_on_ranks
from txl_dist.model.choices import ATTENTION_IMPLEMENTATIONS
from txl_dist.model.devices import triton_unavailable_reason
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import TORCH_DTYPE, require_triton
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.training.compilation import compile_layers
from txl_dist.training.context import RankContext
from txl_dist.training.engine import Engine, create_engine
from txl_dist.training.scores import Evaluate, StepScore
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep

log = logging.getLogger(__name__)


def build_step(rank: RankContext) -> TrainStep:
    """Build the model, its engine, and the memory of this rank's lanes. Collective."""
    config, data, world = rank.config, rank.data, rank.world
    fault_point("engine")
    # Every rank has as many rows as the rank with the most lanes needs for its longest turn.
    num_turns = config.data.num_turns
    num_rows = math.ceil(data.plan.rows_per_rank(world.num_ranks) / num_turns)
    micro_batch_rows = min(num_rows, config.training.micro_batch_lanes or num_rows)
    # Equal on all ranks: at stage 3 every forward and backward is collective, so a rank with fewer
    # lanes computes padding rows.
    shape = {
        "num_micro_batches": math.ceil(num_rows / micro_batch_rows),
        "micro_batch_rows": micro_batch_rows,
    }
    model = TransformerXL(
        data.model_config,
        seed=config.seed,
        recompute_layers=config.training.activation_checkpointing,
    )
    lanes = data.plan.lanes_of_rank(world.rank, world.num_ranks)
    _require_attention(data.model_config.attention, world.device)
    if config.training.compile:
        compile_layers(model, config, world, lanes=range(micro_batch_rows))
    engine = create_engine(model, config, world, **shape)
    log.info("the model is built")
    return TrainStep(
        engine,
        world,
        lanes=lanes,
        seed=config.seed,
        byte_counts_V=data.tokenizer.token_bytes(),
        memory_dtype=TORCH_DTYPE[config.training.memory_dtype],
        num_segments=config.training.backprop_segments,
        num_turns=num_turns,
        **shape,
    )


def _require_attention(name: str, device: torch.device) -> None:
    """Evaluation and generation replace one that cannot run; training was asked for it."""
    require_triton(device)
    facts = ATTENTION_IMPLEMENTATIONS.get(name)
    if facts is None:  # auto
        return
    if facts.is_for_cpus and device.type == "cuda":
        raise ConfigError(
            f"model.attention={name} runs on CPUs only, and the ranks have GPUs. Set "
            "model.attention=auto"
        )
    if facts.needs_triton and (reason := triton_unavailable_reason(device)):
        raise ConfigError(
            f"model.attention={name} needs triton and a GPU of compute capability 8.0 (A100) or "
            f"newer, and {reason}. Set model.attention=auto, which takes it on GPUs; or, to test "
            "the kernels on a CPU with a small model, set the environment variable "
            "TRITON_INTERPRET=1"
        )


def build_evaluator(rank: RankContext, engine: Engine) -> Evaluate | None:
    """A function that scores `data.evaluation` with the current weights; None if that is not done.

    If the run averages its weights, the average is scored.

    The split is opened and its chunks are planned here, once. Raises DataError if it has no target.
    """
    config, data, world = rank.config, rank.data, rank.world
    if data.evaluation is None:
        return None
    model = engine.model
    settings = EvaluationSettings(
        split=data.evaluation.name,
        mode="exact",
        tgt_len=config.segment_len,
        mem_len=model.config.tokens_kept,
        clamp_len=model.config.clamp_len,
        same_length=model.config.same_length,
        reset=config.data.reset,
        max_tokens=config.evaluation.max_tokens,
        precision=config.precision,
    )
    source = data.evaluation.open()
    scorer = Scorer(
        model=model,
        source=source,
        tgt_len=settings.tgt_len,
        reset=settings.reset,
        precision=settings.precision,
        batch_chunks=config.evaluation.batch_chunks,
        byte_counts_V=torch.from_numpy(data.tokenizer.token_bytes()),
    )
    chunks = plan_evaluation(source, settings, model.config)
    text = scored_text(source, max_tokens=settings.max_tokens)

    score = StepScore(
        step=0,
        split=settings.split,
        max_tokens=settings.max_tokens,
        data_digest=data.evaluation.corpus.manifest.digest,
        nats=None,
    )

    def evaluate(state: TrainState, *, stop: object) -> StepScore | None:
        world.activity.name = f"evaluation of split {settings.split}"
        with engine.averaged_weights(), engine.whole_model() as whole_model:
            whole_scorer = replace(scorer, model=whole_model)
            sums = evaluate_on_ranks(whole_scorer, chunks, world=world, stop=stop)
        if sums is None:
            return None
        facts = {"step": state.step, "tokens": state.tokens}
        return score.model_copy(update=facts).with_sums(text.counted(sums))

    return evaluate
