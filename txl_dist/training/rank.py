"""One rank of a run, from start to exit: called by every launcher in the process of the rank.

`build_trainer` builds what computes, observes and saves, and the state to begin with. It is
collective, and so are most of the functions that it calls: every rank calls them in this order.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from data_pipeline.errors import counted
from data_pipeline.system.signals import StopSignals
from data_pipeline.system.sources import shown
from txl_dist.checkpoint.directory import CheckpointDirectory, resume_advice
from txl_dist.config.data_config import TRAIN_SPLIT
from txl_dist.errors import ConfigError, LostRankError, PreemptedError, TxlError
from txl_dist.evaluation.result import scored_text
from txl_dist.evaluation.scoring import Scorer, evaluate_on_ranks
from txl_dist.evaluation.spec import EvaluationSettings, plan_evaluation
from txl_dist.model.choices import ATTENTION_IMPLEMENTATIONS
from txl_dist.model.devices import triton_unavailable_reason
from txl_dist.model.flops import training_flops
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import TORCH_DTYPE, deterministic, device_peak_flops, require_triton
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.process import keep_freed_memory
from txl_dist.runtime.stop import StopDeadline, StopRequest
from txl_dist.runtime.waiting import CollectiveWatch
from txl_dist.runtime.world import World
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.process import TrackingProcess
from txl_dist.tracking.tracker import TrackedDataset, dataset_name
from txl_dist.training.batches import Batches
from txl_dist.training.compilation import compile_layers
from txl_dist.training.data import Corpus
from txl_dist.training.engine import Engine, create_engine
from txl_dist.training.loop import Evaluate, Trainer
from txl_dist.training.origin import load_weights
from txl_dist.training.recovery import Recovery
from txl_dist.training.report import Observer, Report, log_start
from txl_dist.training.saving import open_saver
from txl_dist.training.scores import StepScore
from txl_dist.training.spec import RunDirectory, TrainSpec
from txl_dist.training.start import Start, in_phase_of, resume_at
from txl_dist.training.state import Origin, TrainState
from txl_dist.training.step import TrainStep

log = logging.getLogger(__name__)


def train_rank(spec: TrainSpec, world: World) -> TrainState:
    """Take part in a run until it ends. Errors are logged and raised.

    A stop request before the first step ends the process immediately, with exit code 75. A later
    one asks to stop after the step. If that takes longer than `training.grace_seconds`, the process
    ends too, and its log says why.
    """
    fault_point("start")
    keep_freed_memory()  # before the first large allocation
    directory = RunDirectory(spec.run_path)
    directory.create()
    trainer: Trainer  # built below; the deadline describes it only once a step is completed
    with (
        deterministic(enabled=spec.config.training.deterministic),
        _logging_to(directory.log(world.rank)),
        StopSignals() as signals,
        StopDeadline(
            stop := StopRequest(signals, Path(spec.stop_file) if spec.stop_file else None),
            world.activity,
            describe_loss=lambda: describe_loss(
                trainer.state.step, directory.checkpoints, num_done=world.activity.num_steps
            ),
            advice=partial(resume_advice, spec.run_path),
            grace_seconds=spec.config.training.grace_seconds,
            announce=world.is_rank_zero and not spec.stop_file,  # no launcher of ours does
        ),
        _explained_errors(spec, world, directory),
    ):
        log.info("rank %d is up", world.rank)
        with ExitStack() as stack:
            world.activity.reset()
            trainer = build_trainer(Start.open(spec, world, directory, stack, stop=stop))
            state = trainer.run()
        log.info("finished at step %d", state.step)
        return state


@contextmanager
def _explained_errors(spec: TrainSpec, world: World, directory: RunDirectory) -> Iterator[None]:
    """Log the error that ends a rank; LostRankError instead of it if another rank is the cause."""
    limit_seconds = spec.config.training.rank_timeout_seconds
    with CollectiveWatch(world, run=spec.run_path, limit_seconds=limit_seconds) as watch:
        try:
            yield
        except PreemptedError as request:
            log.info("%s", request)
            raise
        except TxlError as error:
            log.error("%s: %s", type(error).__name__, error)
            _record_error(directory, world, error)
            raise
        except Exception as error:
            cause: TxlError
            # If a collective has failed, the cause is on another rank: report that instead.
            if (lost := watch.lost_rank_error(error)) is not None:
                cause = LostRankError(f"{lost}. {resume_advice(spec.run_path)}")
            elif not directory.checkpoints.steps() and _is_out_of_memory(error):
                # Later, memory that is missing may be there after a restart.
                cause = TxlError(
                    f"the memory of rank {world.rank} is not enough for this run. Lower "
                    "training.micro_batch_lanes, which changes no result; txl estimate shows what "
                    "takes memory, and what more ranks or deepspeed.zero_stage save"
                )
            else:
                log.exception("rank %d failed", world.rank)
                _record_error(directory, world, error)
                raise
            reason = str(error).partition("\n")[0]
            log.error("%s (%s: %s)", cause, type(error).__name__, reason)
            _record_error(directory, world, cause)
            raise cause from error


def _is_out_of_memory(error: Exception) -> bool:
    """On a GPU, or on a CPU, for which torch has no class."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _record_error(directory: RunDirectory, world: World, error: Exception) -> None:
    """Write the event. If other ranks are lost because of this one, rank 0 says so for all."""
    text, rank = f"{type(error).__name__}: {error}", world.rank
    if not isinstance(error, LostRankError):
        directory.event_log.write("error", text, rank=rank)
    elif world.is_rank_zero:
        directory.event_log.write("rank_lost", text, rank=rank)


def describe_loss(step: int, checkpoints: CheckpointDirectory, *, num_done: int) -> str:
    """Which steps are lost if a process ends after `step`, of which it has done `num_done`."""
    saved = checkpoints.steps()
    since = f"the checkpoint of step {saved[-1]}" if saved else "the start"
    num_lost = step - saved[-1] if saved else num_done  # a fork does not begin at step 0
    if num_lost <= 0:
        return "no step is lost"
    return f"the {counted(num_lost, 'step')} since {since} {'is' if num_lost == 1 else 'are'} lost"


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Write the log of this project's packages to a file."""
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    loggers = [logging.getLogger(name) for name in ("txl_dist", "data_pipeline", "cluster")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        with suppress(OSError):  # a full disk must not hide the error that ended the run
            handler.close()


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
        evaluate=build_evaluator(start, step.engine),
        evaluation_is_pending=start.evaluation_is_pending,
        scores=start.scores,
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
    _require_attention(data.model_config.attention, world.device)
    if config.training.compile:
        compile_layers(model, config, world, lanes=range(micro_batch_rows))
    engine = create_engine(model, config, world, **shape)
    log.info("the model is built")
    return TrainStep(
        engine,
        world,
        lanes_in_turns=data.plan.lanes_in_turns(
            data.plan.lanes_of_rank(world.rank, world.num_ranks)
        ),
        seed=config.seed,
        byte_counts_V=data.tokenizer.token_bytes(),
        memory_dtype=TORCH_DTYPE[config.training.memory_dtype],
        num_segments=config.training.backprop_segments,
        **shape,
    )


def _require_attention(name: str, device: torch.device) -> None:
    """Evaluation and generation replace one that cannot run; training was asked for it."""
    require_triton(device)
    if name == "auto":
        return
    facts = ATTENTION_IMPLEMENTATIONS[name]
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
    """A function that scores `data.evaluation` with the current weights, or with their average if
    the run has one; None if that is not done. Raises DataError if the split has no target.
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
    source = data.evaluation.corpus.open(settings.split)
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
        return StepScore.of(
            text.counted(sums),
            step=state.step,
            tokens=state.tokens,
            split=settings.split,
            max_tokens=settings.max_tokens,
            data_digest=digest,
        )

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
    return [
        Report(
            start.stack.enter_context(MetricsJournal(start.directory.metrics)),
            start.directory.event_log,
            world.activity,
            config,
            flops_per_token=flops / data.tokens_per_step,
            peak_flops=peak_flops,
        )
    ]


@cache
def measure_peak_flops(world: World, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks at the same time, in the `dtype` of the run's matrix products.

    Collective. Measured once per process.
    """
    world.barrier()
    flops = device_peak_flops(world.device, dtype)
    return float(world.all_reduce_sum(torch.tensor([flops], dtype=torch.float64)))


def start_tracker(start: Start, state: TrainState) -> TrackingProcess | None:
    """Start sending metrics to MLflow. The status of the run depends on how `stack` ends."""
    # Rank 0 only: MLflow would record one copy per rank.
    if not (start.world.is_rank_zero and start.config.tracking.enabled):
        return None
    corpora, evaluation = start.data.corpora, start.data.evaluation
    tags = {"num_ranks": str(start.world.num_ranks)}
    if state.origin is not None:
        tags["origin"] = str(state.origin)
    if len(corpora) > 1:
        tags |= {f"data.{corpus.name}": corpus.manifest.digest for corpus in corpora}
    datasets = [tracked_dataset(corpus, TRAIN_SPLIT, "training") for corpus in corpora]
    if evaluation is not None:
        datasets.append(tracked_dataset(evaluation.corpus, evaluation.name, "evaluation"))
    tracker = TrackingProcess(start.directory.path, start.config, tags=tags, datasets=datasets)
    return start.stack.enter_context(tracker)


def tracked_dataset(corpus: Corpus, split: str, context: str) -> TrackedDataset:
    """A split that a run trains on or scores, as a tracker records it."""
    manifest, source = corpus.manifest, shown(str(corpus.directory))
    entry = manifest.splits[split]
    return TrackedDataset(
        name=dataset_name(source, split),
        digest=manifest.digest,
        source=source,
        context=context,
        profile={
            "tokens": entry.tokens,
            "documents": entry.documents,
            "text_bytes": entry.text_bytes if manifest.has_text else None,
            "vocab_size": manifest.vocab_size,
            "dtype": manifest.dtype,
            "tokenizer_sha256": manifest.tokenizer_digest,
        },
    )
