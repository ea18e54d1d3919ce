"""Builds the Trainer of one rank: what computes, observes and saves, and the state to begin with.

`build_trainer` is collective, and so are most of the functions that it calls: every rank calls them
in this order.
"""

import logging
import math
from contextlib import closing
from dataclasses import replace
from functools import cache

import torch

from data_pipeline.system.sources import shown
from txl_dist.config.data_config import TRAIN_SPLIT
from txl_dist.errors import ConfigError
from txl_dist.evaluation.result import scored_text
from txl_dist.evaluation.scoring import Scorer, evaluate_on_ranks
from txl_dist.evaluation.spec import EvaluationSettings, plan_evaluation
from txl_dist.model.choices import ATTENTION_IMPLEMENTATIONS
from txl_dist.model.devices import triton_unavailable_reason
from txl_dist.model.flops import training_flops
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import TORCH_DTYPE, device_peak_flops, require_triton
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.stop import StopRequest
from txl_dist.runtime.world import World
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.process import TrackingProcess
from txl_dist.tracking.tracker import TrackedDataset, dataset_name
from txl_dist.training.batches import Batches
from txl_dist.training.compilation import compile_layers
from txl_dist.training.data import TrainingData
from txl_dist.training.engine import Engine, create_engine
from txl_dist.training.loop import Evaluate, Evaluation, Trainer
from txl_dist.training.origin import load_weights
from txl_dist.training.recovery import Recovery
from txl_dist.training.report import Observer, Report, log_start
from txl_dist.training.saving import open_saver
from txl_dist.training.scores import StepScore
from txl_dist.training.start import Start, in_phase_of, resume_at
from txl_dist.training.state import Origin, TrainState
from txl_dist.training.step import TrainStep

log = logging.getLogger(__name__)


def build_trainer(start: Start) -> Trainer:
    """Resume or initialise, and build all parts of the run. Collective."""
    step = build_step(start)
    batches = Batches(start.data, start.config, start.world, num_rows=step.num_rows)
    start.stack.enter_context(closing(batches))
    if start.point is not None:
        state = resume_at(start.point, start, step, batches)
    else:
        stored = start.origin
        origin = Origin(path=str(stored.path), digest=stored.digest) if stored else None
        state = in_phase_of(start, TrainState(origin=origin))
    # Before the observers, which continue its files.
    reached_steps = start.world.run_on_all(
        lambda: start.clean_directory() if start.world.is_rank_zero else 0
    )
    # Before the tracker: the peak is measured without its process.
    observers = build_observers(start)
    tracker = start_tracker(start, state)
    if start.world.is_rank_zero:
        log_start(start, state, shapes=step.engine.shapes, reached_step=reached_steps[0])
    saver = open_saver(start, step, tracker)
    batches.open_at(state)
    return Trainer(
        config=start.config,
        state=state,
        batches=batches,
        step=step,
        observers=observers,
        saver=saver,
        evaluation=Evaluation(
            build_evaluator(start, step.engine), start.scores, start.evaluation_is_pending
        ),
        recovery=Recovery(start, step, batches, observers, saver),
        stop=start.stop,
    )


# --- what computes --------------------------------------------------------------------------------


def build_step(start: Start) -> TrainStep:
    """Build the model, its engine, and the memory of this rank's lanes. Collective."""
    config, data, world = start.config, start.data, start.world
    fault_point("engine")
    num_rows = data.plan.rows_per_rank(world.num_ranks)
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
    if start.origin is not None:
        load_weights(start.origin, model, world)
    lanes = data.plan.lanes_of_rank(world.rank, world.num_ranks)
    _require_attention(data.model_config.attention, world.device)
    if config.training.compile:
        compile_layers(model, config, world, lanes=range(micro_batch_rows))
    engine = create_engine(model, config, world, **shape)
    log.info("the model is built")
    return TrainStep(
        engine,
        world,
        lanes_in_turns=data.plan.lanes_in_turns(lanes),
        seed=config.seed,
        byte_counts_V=data.tokenizer.token_bytes(),
        memory_dtype=TORCH_DTYPE[config.training.memory_dtype],
        num_segments=config.training.backprop_segments,
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


def build_evaluator(start: Start, engine: Engine) -> Evaluate | None:
    """A function that scores `data.evaluation` with the current weights; None if that is not done.

    If the run averages its weights, the average is scored.

    The split is opened and its chunks are planned here, once. Raises DataError if it has no target.
    """
    config, data, world = start.config, start.data, start.world
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
    digest = data.evaluation.corpus.manifest.digest

    def evaluate(state: TrainState, stop: StopRequest) -> StepScore | None:
        world.activity.name = f"evaluation of split {settings.split}"
        with engine.averaged_weights(), engine.whole_model() as whole_model:
            whole_scorer = replace(scorer, model=whole_model)
            sums = evaluate_on_ranks(whole_scorer, chunks, world=world, stop=stop)
        if sums is None:
            return None
        score = StepScore(
            step=state.step,
            tokens=state.tokens,
            split=settings.split,
            max_tokens=settings.max_tokens,
            data_digest=digest,
            nats=None,
        )
        return score.with_sums(text.counted(sums))

    return evaluate


# --- what observes --------------------------------------------------------------------------------


def build_observers(start: Start) -> list[Observer]:
    """The observers of this rank; a new one is one class and one entry here. Collective."""
    world, config, data = start.world, start.config, start.config.data
    peak_flops = measure_peak_flops(world, TORCH_DTYPE[config.precision])
    if not world.is_rank_zero:
        return []
    flops = training_flops(
        start.data.model_config,
        num_lanes=data.rows,
        tgt_len=data.tgt_len,
        num_segments=config.training.backprop_segments,
    )
    report = Report(
        start.stack.enter_context(MetricsJournal(start.directory.metrics)),
        start.directory.event_log,
        world.activity,
        config,
        flops_per_token=flops / data.tokens_per_step,
        peak_flops=peak_flops,
    )
    return [report]


@cache
def measure_peak_flops(world: World, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks at the same time, in the `dtype` of the run's matrix products.

    Collective. Measured once per process.
    """
    world.barrier()
    own = torch.tensor([device_peak_flops(world.device, dtype)], dtype=torch.float64)
    return float(world.all_reduce_sum(own))


# --- what is tracked ------------------------------------------------------------------------------


def start_tracker(start: Start, state: TrainState) -> TrackingProcess | None:
    """Start sending metrics to MLflow. The status of the run depends on how `stack` ends."""
    # Rank 0 only: MLflow would record one copy per rank.
    if not (start.world.is_rank_zero and start.config.tracking.enabled):
        return None
    corpora = start.data.corpora
    tags = {"num_ranks": str(start.world.num_ranks)}
    if state.origin is not None:
        tags["origin"] = str(state.origin)
    if len(corpora) > 1:
        tags |= {f"data.{corpus.name}": corpus.manifest.digest for corpus in corpora}
    tracker = TrackingProcess(
        start.directory.path, start.config, tags=tags, datasets=tracked_datasets(start.data)
    )
    return start.stack.enter_context(tracker)


def tracked_datasets(data: TrainingData) -> list[TrackedDataset]:
    """The splits that a run trains on and scores, as a tracker records them."""
    splits = [(corpus, TRAIN_SPLIT, "training") for corpus in data.corpora]
    if data.evaluation is not None:
        splits.append((data.evaluation.corpus, data.evaluation.name, "evaluation"))
    datasets = []
    for corpus, split, context in splits:
        manifest, source = corpus.manifest, shown(str(corpus.directory))
        entry = manifest.splits[split]
        profile = {
            "tokens": entry.tokens,
            "documents": entry.documents,
            "text_bytes": entry.text_bytes if manifest.has_text else None,
            "vocab_size": manifest.vocab_size,
            "dtype": manifest.dtype,
            "tokenizer_sha256": manifest.tokenizer_digest,
        }
        datasets.append(
            TrackedDataset(
                name=dataset_name(source, split),
                digest=manifest.digest,
                source=source,
                context=context,
                profile=profile,
            )
        )
    return datasets
