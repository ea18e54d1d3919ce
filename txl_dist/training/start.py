"""The start of a rank: from the spec to the state and memory from which its run continues.

    data              opened and checked, before the ranks wait for each other
    other ranks       joined, and the same spec on all of them
    lock              of the run directory, so that one process on a host writes it
    resume point      the checkpoint to resume from, or none (`resume.py`)
    origin            the model from whose weights a new run starts, if any (`origin.py`)
    attempt           ends older attempts of the run
    scores            of the run until now, and whether that of the resume point is missing

`rank.py` builds the run from a Start. `resume_at` then loads the checkpoint: weights, optimizer
state, and the memory of the lanes.

A checkpoint's memory does not fit if the number of lanes has changed, or if it has become longer.
It is replayed then: the tokens before the position are read again, without scoring. The receptive
field of a token is finite, so the segments in it give the memory that a lane would have if it had
read the whole epoch up to there with the current weights (decision 5 has the argument). Nothing is
trained, and dropout is off. A kind of memory without such a limit is refused.
"""

import hashlib
import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version

from data_pipeline.errors import counted
from data_pipeline.system.files import remove_leftovers, write_file
from txl_dist.checkpoint.checkpoints import CheckpointHeader
from txl_dist.checkpoint.directory import reading
from txl_dist.checkpoint.tensors import check_parameters, load_fragments, load_memory
from txl_dist.config.config_file import default_settings, dump_run_config, flatten_config
from txl_dist.config.run_config import RunConfig
from txl_dist.convert.stored_model import StoredModel
from txl_dist.errors import ConfigError
from txl_dist.model.memory import memory_kind
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.process import LIBRARIES, code_description, source_digest
from txl_dist.runtime.stop import StopRequest
from txl_dist.runtime.world import World
from txl_dist.tracking.journal import MetricsJournal, last_trained_step
from txl_dist.training.batches import Batches
from txl_dist.training.data import TrainingData
from txl_dist.training.origin import find_origin
from txl_dist.training.phases import phases_from
from txl_dist.training.resume import Resume, ResumePoint, run_id_of
from txl_dist.training.scores import ScoreTable, due_in
from txl_dist.training.spec import LEASE_SECONDS, RunDirectory, TrainSpec, begin_attempt
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep

LOCK_TIMEOUT_SECONDS = 30.0
"""After a failure Ray may start a new rank 0 shortly before the old one has released the lock."""

BATCH_SETTINGS = ("data.num_lanes", "data.lanes_per_step", "data.tgt_len")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One rank at the start of a run: the input of the functions that build its parts."""

    spec: TrainSpec
    world: World
    directory: RunDirectory
    stack: ExitStack
    """Closes files, locks, threads and processes."""
    stop: StopRequest
    data: TrainingData
    point: ResumePoint | None
    """None: a new run."""
    origin: StoredModel | None
    """The model from whose weights a new run starts; None: the weights are random."""
    kept_step: int
    """The last step in the run directory that stays part of the run; 0 for a new run or a fork."""
    run_id: str
    scores: ScoreTable | None
    """On rank 0."""
    evaluation_is_pending: bool
    """Whether the run begins with the evaluation of the resume point."""

    @classmethod
    def open(
        cls,
        spec: TrainSpec,
        world: World,
        directory: RunDirectory,
        stack: ExitStack,
        *,
        stop: StopRequest | None = None,
    ) -> "Start":
        """Open the data, join the ranks and begin an attempt. Collective.

        Raises DataError or ConfigError for data or settings that cannot be used, ConfigError if the
        ranks have different ones, and the errors of `Resume.find` and `begin_attempt`.
        """
        # Before the rendezvous: wrong data or config must not cost one.
        data = TrainingData.open(spec.config, num_ranks=world.num_ranks)
        world.join(timeout_seconds=spec.config.training.rank_timeout_seconds)
        log.info("all ranks are up: %s", counted(world.num_ranks, "rank"))
        require_same_spec(spec.config, data, world)

        checkpoints = directory.checkpoints
        # Within the time limit of the other ranks, which wait.
        lease_seconds = 0.8 * spec.config.training.rank_timeout_seconds - LOCK_TIMEOUT_SECONDS
        lock = spec.lock_of(
            directory,
            timeout_seconds=LOCK_TIMEOUT_SECONDS,
            lease_seconds=max(0.0, min(LEASE_SECONDS, lease_seconds)),
        )
        world.run_on_rank_zero(lambda: stack.enter_context(lock))
        resume = Resume(spec, data, world, checkpoints)
        point = resume.find()
        origin = find_origin(spec.config, data, world) if point is None else None
        run_id, newest_step = world.broadcast(run_id_of(point)), checkpoints.newest_step()
        # Only after all checks: beginning an attempt fences the one that is running.
        checkpoints.attempt = begin_attempt(spec, directory, world, run_id=run_id)
        if world.broadcast(checkpoints.newest_step() != newest_step):
            # The older attempt has saved meanwhile.
            point = resume.find(download=False)
            run_id = world.broadcast(run_id_of(point))
            origin = origin if point is None else None

        stop = StopRequest() if stop is None else stop
        if not spec.stop_file:  # torchrun has started the ranks; a launcher would give them one
            world.run_on_rank_zero(directory.remove_stop_files)
            stop.share_by(directory.stop_file)
            if world.is_rank_zero:
                stack.callback(directory.stop_file.unlink, missing_ok=True)

        kept_step = 0 if point is None or point.is_fork else point.state.step
        scores, is_pending = None, False

        def open_scores() -> None:
            nonlocal scores, is_pending
            is_due = due_in(spec.config) if data.evaluation else lambda step: False
            inherited = point.state.best if point is not None and not point.is_fork else None
            scores = ScoreTable(checkpoints, is_due, inherited=inherited)
            # A new run has no scores, not even of the weights that it starts from.
            scores.rewind(-1 if point is None else kept_step)
            is_pending = kept_step in scores.waiting() or (point is None and is_due(0))

        world.run_on_rank_zero(open_scores)
        return cls(
            spec=spec, world=world, directory=directory, stack=stack, stop=stop, data=data,
            point=point, origin=origin, kept_step=kept_step, run_id=run_id, scores=scores,
            evaluation_is_pending=world.broadcast(is_pending),
        )  # fmt: skip

    @property
    def config(self) -> RunConfig:
        return self.spec.config

    @property
    def checkpoint_header(self) -> CheckpointHeader:
        """What all checkpoints of this attempt have in common."""
        attempt = self.directory.checkpoints.attempt
        return CheckpointHeader(
            written_by=code_description(),
            model=asdict(self.data.model_config),
            run=flatten_config(self.config),
            run_id=self.run_id,
            attempt=attempt.record.number if attempt else 0,
            tokenizer_json=self.data.tokenizer.to_json(),
            tokenizer_digest=self.data.tokenizer.digest,
            data_digest=self.data.digest,
            vocab_size=self.data.vocabulary.vocab_size,
            zero_stage=self.config.deepspeed.zero_stage,
            num_lanes=self.config.data.num_lanes,
        )

    def clean_directory(self) -> int:
        """Make the run directory consistent: no checkpoints, scores or metrics after the start.

        Called on rank 0. Returns the last step of the metrics before that.
        """
        directory, evaluation, scores = self.directory, self.data.evaluation, self.scores
        assert scores is not None
        reached_step = last_trained_step(directory.metrics)
        # Everything here is idempotent: a process killed at any line leaves a directory that the
        # next start makes consistent again.
        directory.checkpoints.open()
        for step in directory.checkpoints.rewind(self.kept_step, best_step=scores.best_step):
            log.warning("the checkpoint at step %d is renamed to superseded-*", step)
        for path in (directory.config, directory.metrics):
            remove_leftovers(path)
        write_file(directory.config, dump_run_config(self.config).encode())
        is_pending = self.evaluation_is_pending
        redone = {self.kept_step: f"{evaluation.name}/loss"} if evaluation and is_pending else {}
        with MetricsJournal(directory.metrics) as journal:
            # A copy of the run from a URL has metrics, but no files of scores.
            journal.truncate_after(self.kept_step, redone=redone)
        scores.write_metrics(directory.metrics)
        return reached_step


def require_same_spec(config: RunConfig, data: TrainingData, world: World) -> None:
    """Raises ConfigError on every rank, listing what differs by rank. Collective.

    Other versions or data would train without an error, on gradients of different computations.
    """
    local = {
        "txl-dist": version("txl-dist"),
        **{name: version(name) for name in LIBRARIES},
        "sources": source_digest()[:16],
        # The resolved config: overrides on the command line count too.
        "config": hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16],
        **{f"data {corpus.name}": corpus.manifest.digest for corpus in data.corpora},
    }
    specs = world.all_gather(local)
    lines = []
    for name in dict.fromkeys(name for spec in specs for name in spec):
        if len({spec.get(name) for spec in specs}) > 1:
            values = (f"rank {rank} {spec.get(name)}" for rank, spec in enumerate(specs))
            lines.append(f"\n  {name}: {', '.join(values)}")
    if lines:
        raise ConfigError(
            f"the ranks do not agree on code, config or data:{''.join(lines)}\nInstall the same "
            "version on all machines, and give every rank the same command and the same data "
            "(txl data verify DIR on each machine)"
        )


# --- loading a checkpoint -------------------------------------------------------------------------


def resume_at(point: ResumePoint, start: Start, step: TrainStep, batches: Batches) -> TrainState:
    """Load weights, optimizer state and memory; returns the state of the run. Collective."""
    fault_point("resume")
    engine = step.engine
    # The configs are compatible; this detects changes in the code of the model.
    check_parameters(point.path, point.manifest, engine.shapes)
    # At a fork, the other run may remove the checkpoint.
    with reading(point.path):
        load_fragments(point.path, point.manifest, engine.fragments_to_load())
        engine.finish_loading(num_steps=point.state.step - point.state.skipped_steps)
        if has_memory_for(start.config, point):
            step.load_memory(load_memory(point.path, point.manifest, step.lanes))
    state = in_phase_of(start, point.state)
    if state.phases != point.state.phases or has_other_batches(start.config, point):
        divergence = state.divergence.for_other_text(after=state.step)
        state = state.model_copy(update={"divergence": divergence})
    if num_segments := segments_to_replay(start.config, point, state):
        # The memory has no gap any more then.
        state = state.model_copy(update={"contiguous_from": 0})
        step.world.activity.name = f"replay of {counted(num_segments, 'segment')}"
        fault_point("replay")
        replayed = batches.before(state, num_segments=num_segments)
        with engine.whole_model() as model:
            for batch in replayed:
                step.replay(batch, model, start.config.precision)
        num_tokens = num_segments * start.config.data.tgt_len
        log.info("memory | replayed %s tokens per lane, unscored", f"{num_tokens:,}")
    return state


def in_phase_of(start: Start, state: TrainState) -> TrainState:
    """The state with the data of this spec as its last phase."""
    phases = phases_from(
        state.phases,
        start.data.phase,
        position=state.position,
        context_tokens=context_segments(start.config) * start.config.data.tgt_len,
    )
    return state.model_copy(update={"phases": phases})


def has_other_batches(config: RunConfig, point: ResumePoint) -> bool:
    """Whether a step reads other tokens than the steps that led to a checkpoint."""
    before, now = {**default_settings(), **point.manifest.run}, flatten_config(config)
    return any(before[key] != now[key] for key in BATCH_SETTINGS)


def context_segments(config: RunConfig) -> int:
    """Segments that determine the memory; 0 without a memory, or if no number of them does."""
    num_tokens = memory_kind(config.model).receptive_tokens(config.segment_len)
    return -(-(num_tokens or 0) // config.data.tgt_len)


def has_memory_for(config: RunConfig, point: ResumePoint) -> bool:
    """Whether the memory of a checkpoint fits: the same lanes, and rows that can be loaded."""
    has_lanes = len(point.manifest.rank_of_lane) == config.data.num_lanes
    return has_lanes and memory_kind(config.model).fits(point.manifest.architecture)


def segments_to_replay(config: RunConfig, point: ResumePoint, state: TrainState) -> int:
    """How many segments to replay before the first step after a resume; usually none.

    Raises ConfigError if the memory would have to be replayed, and no number of segments is enough.
    """
    phase = state.phases[-1]
    # After a change of the corpora, or at the start of an epoch, lanes start without a memory.
    is_cold = phase.position == state.position and not phase.unread
    if is_cold or has_memory_for(config, point):
        return 0
    if memory_kind(config.model).receptive_tokens(config.segment_len) is None:
        raise ConfigError(
            f"the lanes of {point.path} cannot be given to other lanes or another memory: "
            f"model.memory={config.model.memory} may depend on any earlier token, so it cannot be "
            "read again. Keep data.num_lanes and model.mem_len, or start a new run"
        )
    return context_segments(config)
