"""The one build chain: TrainJob -> data -> model -> engine -> loop. Every launcher ends up here."""

import hashlib
import logging
import math
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from data_pipeline.storage.atomic_files import remove_leftovers, write_file
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.pipeline import segment_pipeline
from data_pipeline.streams.segment_stream import SegmentStream
from txl_dist.checkpoint.directory import divergence_advice
from txl_dist.checkpoint.manifest import Phase, TrainState
from txl_dist.checkpoint.writer import CheckpointHeader
from txl_dist.config.config_file import dump_run_config, flatten_config
from txl_dist.errors import ConfigError
from txl_dist.evaluation.evaluate import (
    EvaluationResult,
    EvaluationSettings,
    evaluate_on_ranks,
    plan_evaluation,
)
from txl_dist.evaluation.scoring import Scorer
from txl_dist.model.flops import training_flops
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.precision import PRODUCT_DTYPE
from txl_dist.runtime.source_digest import LIBRARIES, code_description, source_digest
from txl_dist.runtime.stop_signals import StopRequest
from txl_dist.runtime.world import World
from txl_dist.tracking.journal import MetricsJournal
from txl_dist.tracking.tracker import Tracker
from txl_dist.training.data import TrainingData
from txl_dist.training.engine import Engine
from txl_dist.training.job import TrainJob
from txl_dist.training.loop import Evaluate, Training
from txl_dist.training.phases import phases_from
from txl_dist.training.report import Report
from txl_dist.training.resume import ResumePoint, find_resume_point, remaining_work, restore
from txl_dist.training.run_directory import RunDirectory
from txl_dist.training.saving import RunSaver
from txl_dist.training.step import TrainStep
from txl_dist.training.utilisation import Utilisation

LOCK_PATIENCE_SECONDS = 30.0

log = logging.getLogger(__name__)


class RankBuilder:
    """Builds the parts of one rank; what it opens is closed when `stack` is."""

    def __init__(
        self,
        job: TrainJob,
        world: World,
        directory: RunDirectory,
        stack: ExitStack,
        stop: StopRequest | None = None,
    ) -> None:
        self.job, self.config, self.world = job, job.config, world
        self.directory, self.stack = directory, stack
        self.stop = StopRequest() if stop is None else stop
        self.data = TrainingData.open(job.config, num_ranks=world.num_ranks)
        self.journal: MetricsJournal | None = None
        """Rank 0's."""

    def training(self) -> Training:
        """Everything, in order; collective from the first line on."""
        self.world.join(timeout_seconds=self.config.training.rank_timeout_seconds)
        self._check_same_job()
        self.world.run_on_rank_zero(self._lock)
        point = find_resume_point(self.job, self.data, self.world)
        engine, step = self._engine_and_step()
        state = TrainState()
        if point is not None:
            restore(point, engine, step)
            state = point.state(evaluates=self.data.evaluation is not None)
        state, phase = self._in_phase(state)
        plan = self.data.plan_of(phase)
        self.world.run_on_rank_zero(lambda: self._open_run(state, point))
        utilisation = self._utilisation()  # before the sender starts and uses the processor too
        tracker = self._tracker(new_run=point is None)
        report = Report(
            self.journal, num_steps=self.config.training.num_steps, utilisation=utilisation
        )
        report.event("%s", self._announcement(engine, state, point))
        report.evaluation_plan(self.config.evaluation, self.data)
        if len(state.phases) > 1 or len(phase.corpora) > 1:
            report.phase(state, is_new=phase.position == state.position)
        evaluated = self.data.evaluation
        return Training(
            config=self.config,
            plan=plan,
            segments=segment_pipeline(self._stream(step, state, plan)),
            step=step,
            report=report,
            stop=self.stop,
            saver=self._saver(step, tracker, point),
            evaluate=self._evaluator(engine),
            evaluated_data=evaluated.corpus.manifest.digest if evaluated else None,
            state=state,
            divergence_advice=partial(divergence_advice, self.directory.path),
        )

    def _in_phase(self, state: TrainState) -> tuple[TrainState, Phase]:
        """The state with the phase it goes on in, and that phase: the last, or a new one."""
        phases = phases_from(
            state.phases,
            self.data.phase,
            position=state.position,
            num_lanes=self.config.data.num_lanes,
        )
        return state.model_copy(update={"phases": phases}), phases[-1]

    def _lock(self) -> None:
        # A rank 0 that Ray is just replacing may hold it a little longer.
        self.stack.enter_context(self.directory.locked(patience_seconds=LOCK_PATIENCE_SECONDS))

    def _open_run(self, state: TrainState, point: ResumePoint | None) -> None:
        """Bring the run directory to where the run goes on from; on rank 0."""
        checkpoints = self.directory.checkpoints
        checkpoints.open()
        for step in checkpoints.rewind(
            state.step,
            best_step=state.best.step if state.best else None,
            source=point.path if point else None,
        ):
            log.warning("the checkpoint at step %d is set aside as superseded-*", step)
        for path in (self.directory.config, self.directory.metrics):
            remove_leftovers(path)
        write_file(self.directory.config, dump_run_config(self.config).encode())
        self.journal = self.stack.enter_context(MetricsJournal(self.directory.metrics))
        evaluated = self.data.evaluation
        redone = f"{evaluated.name}/loss" if evaluated and state.evaluation_pending else None
        self.journal.truncate_after(state.step, redone=redone)

    def _check_same_job(self) -> None:
        """Every rank must run the same config on the same data with the same code."""
        config = self.config.model_dump_json()
        mine = {
            "txl-dist": version("txl-dist"),
            **{name: version(name) for name in LIBRARIES},
            "sources": source_digest()[:16],
            "config": hashlib.sha256(config.encode()).hexdigest()[:16],
            **self.data.digests,
        }
        everyone = self.world.gather(mine)
        names = dict.fromkeys(name for one in everyone for name in one)
        differing = [n for n in names if len({one.get(n) for one in everyone}) > 1]
        if differing:
            lines = [
                f"\n  {name}: "
                + ", ".join(f"rank {rank} {one.get(name)}" for rank, one in enumerate(everyone))
                for name in differing
            ]
            raise ConfigError(
                f"the ranks were not started alike; they would train something else than one "
                f"model:{''.join(lines)}\nInstall the same version on all machines, give every "
                "rank the same data (txl data verify DIR on each machine) and the same command"
            )

    def _engine_and_step(self) -> tuple[Engine, TrainStep]:
        config, plan, world = self.config, self.data.plan, self.world
        num_rows = plan.rows_per_rank(world.num_ranks)
        micro_batch_rows = min(num_rows, config.training.micro_batch_lanes or num_rows)
        num_micro_batches = -(-num_rows // micro_batch_rows)
        shape = {"num_micro_batches": num_micro_batches, "micro_batch_rows": micro_batch_rows}
        model = TransformerXL(self.data.model_config, seed=config.seed)
        engine = Engine(model, config, world, **shape)
        step = TrainStep(
            engine,
            world,
            lanes=plan.lanes_of_rank(world.rank, world.num_ranks),
            seed=config.seed,
            byte_counts_V=torch.from_numpy(self.data.tokenizer.token_bytes()),
            **shape,
        )
        return engine, step

    def _utilisation(self) -> Utilisation:
        data = self.config.data
        flops = training_flops(
            self.data.model_config, num_lanes=data.num_lanes, tgt_len=data.tgt_len
        )
        dtype = PRODUCT_DTYPE[self.config.precision]
        return Utilisation(self.world, dtype, flops_per_step=flops)

    def _stream(self, step: TrainStep, state: TrainState, plan: LanePlan) -> SegmentStream:
        data = self.config.data
        stream = SegmentStream(
            self.data.source_of(state.phases[-1], self.config),
            plan,
            lanes=step.lanes,
            num_rows=len(step.lane_of_row),
            reset=data.reset,
            shuffle=data.shuffle,
            seed=self.config.seed,
            position=state.position,
            prefetch_segments=data.prefetch_segments,
        )
        return self.stack.enter_context(closing(stream))

    def _evaluator(self, engine: Engine) -> Evaluate | None:
        evaluation, evaluated = self.config.evaluation, self.data.evaluation
        if evaluated is None:
            return None
        model = engine.model
        settings = EvaluationSettings(
            split=evaluated.name,
            mode="exact",
            tgt_len=self.config.data.tgt_len,
            mem_len=model.config.mem_len,
            clamp_len=model.config.clamp_len,
            same_length=model.config.same_length,
            reset=self.config.data.reset,
            max_tokens=evaluation.max_tokens,
            precision=self.config.precision,
        )
        scorer = Scorer(
            model=model,
            source=evaluated.open(),
            tgt_len=settings.tgt_len,
            reset=settings.reset,
            precision=settings.precision,
            batch_chunks=evaluation.batch_chunks,
            byte_counts_V=torch.from_numpy(self.data.tokenizer.token_bytes()),
        )

        chunks = plan_evaluation(scorer.source, settings, n_layer=model.config.n_layer)

        def evaluate(*, stop: object) -> EvaluationResult | None:
            self.world.activity.name = f"evaluation of split {settings.split}"
            with engine.whole_model() as whole:
                scoring = replace(scorer, model=whole)
                return evaluate_on_ranks(scoring, chunks, settings, world=self.world, stop=stop)

        return evaluate

    def _saver(
        self, step: TrainStep, tracker: Tracker | None, point: ResumePoint | None
    ) -> RunSaver:
        header = CheckpointHeader(
            written_by=code_description(),
            model=asdict(self.data.model_config),
            run=flatten_config(self.config),
            tokenizer_json=self.data.tokenizer.to_json(),
            tokenizer_digest=self.data.tokenizer.digest,
            data_digest=self.data.digest,
            vocab_size=self.data.vocabulary.vocab_size,
            zero_stage=self.config.deepspeed.zero_stage,
            num_lanes=self.config.data.num_lanes,
        )

        checkpoints = self.directory.checkpoints
        return RunSaver(
            checkpoints,
            header=header,
            step=step,
            tracker=tracker,
            keep=self.config.training.keep_checkpoints,
            saved_file=Path(self.job.saved_file) if self.job.saved_file else None,
            saved_step=point.step_in(checkpoints) if point else None,
        )

    def _tracker(self, *, new_run: bool) -> Tracker | None:
        """Starts sending to MLflow, from rank 0; its end status follows from how `stack` closes."""
        if not (self.world.is_rank_zero and self.config.tracking.enabled):
            return None
        corpora = self.data.corpora
        several = len(corpora) > 1
        digests = {f"data.{c.name}": c.manifest.digest for c in corpora} if several else {}
        return self.stack.enter_context(
            Tracker.start(
                self.directory.path,
                self.config,
                data_manifest=self._data_manifest(),
                tags={"num_ranks": str(self.world.num_ranks), **digests},
                new_run=new_run,
            )
        )

    def _data_manifest(self) -> Path | None:
        """A local file with the one corpus's manifest; of a dataset behind a URL, a copy."""
        if len(self.data.corpora) > 1:
            return None
        (corpus,) = self.data.corpora
        if isinstance(corpus.directory, Path):
            return corpus.directory / "manifest.json"
        copy = self.directory.path / "data-manifest.json"
        write_file(copy, corpus.manifest.to_bytes())
        return copy

    def _announcement(self, engine: Engine, state: TrainState, point: ResumePoint | None) -> str:
        config, world = self.config, self.world
        remaining = remaining_work(state, num_steps=config.training.num_steps)
        if remaining is None:
            return (
                f"this run is finished: {state.step} of training.num_steps="
                f"{config.training.num_steps} steps are done. To train it further: "
                f"training.num_steps={2 * state.step} --allow-change training.num_steps"
            )
        num_parameters = sum(map(math.prod, engine.shapes.values()))
        begin = f"resuming at step {state.step} from {point.path}" if point else "a new run"
        return (
            f"{begin} | {num_parameters:,} parameters | {world.num_ranks} ranks on "
            f"{world.device.type} | ZeRO stage {config.deepspeed.zero_stage} | "
            f"{config.precision} | "
            f"{config.data.num_lanes} lanes of {self.data.plan.lane_tokens:,} tokens an epoch | "
            f"{remaining}"
        )
