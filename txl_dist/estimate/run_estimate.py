"""The estimate of one run for several numbers of GPUs, from the modules of this package.

`estimate_run` computes a `ScaleEstimate` per number of GPUs. All values are plain numbers in SI
units, so that `asdict` is the JSON of the command; `report.py` prints them.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.estimate.assumptions import Assumptions
from txl_dist.estimate.checkpoint import (
    CheckpointSize,
    best_interval_seconds,
    checkpoint_size,
    goodput,
)
from txl_dist.estimate.communication import Collective, StepTime, collectives_of_step, step_time
from txl_dist.estimate.data_facts import DataFacts
from txl_dist.estimate.dry_run import dry_run, tail_rows
from txl_dist.estimate.limits import Limit, limits_of_run
from txl_dist.estimate.memory import MemoryUse, ModelNeeds, RankMemory
from txl_dist.estimate.zero_settings import ZeroSettings
from txl_dist.model.flops import training_flops
from txl_dist.model.memory import memory_kind

STAGES = (0, 1, 2, 3)
HOUR_SECONDS, DAY_SECONDS = 3600.0, 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEstimate:
    """One ZeRO stage on one number of GPUs. Bytes are those of one rank."""

    memory: MemoryUse
    bytes_sent: float
    """Bytes sent per step, with ring algorithms."""
    step: StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingEstimate:
    """Checkpoints and failures on one number of GPUs."""

    size: CheckpointSize
    save_seconds: float
    """Time for which one save stops training."""
    write_seconds: float
    interval_seconds: float
    """Configured time between two checkpoints."""
    best_interval_steps: int
    mtbf_seconds: float
    """Mean time between failures of the whole run."""
    goodput: float
    """Share of the time that is progress, with the configured interval."""
    best_goodput: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleEstimate:
    """The run on one number of GPUs."""

    gpus: int
    num_lanes: int
    num_steps: int | None
    """Steps of the whole run; None: they depend on a dataset that does not exist."""
    lanes_per_rank: int
    micro_batches: int
    padded_share: float
    """Share of the computed rows that are padding, because the lanes do not divide evenly."""
    stages: dict[int, StageEstimate]
    """By ZeRO stage; without the stages that the optimizer does not support."""
    step_seconds: float
    """Step time at the ZeRO stage of the run."""
    tokens_per_second: float
    """Tokens per second, summed over all ranks."""
    days: float | None
    """Duration of the whole run without failures."""
    days_with_failures: float | None
    """Duration with failures and the configured checkpoint interval."""
    data_bytes_per_second: float | None
    """Compressed shards that one rank reads."""
    saving: SavingEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEstimate:
    """A run, at several scales."""

    num_parameters: int
    flops_per_token: float
    """Forward and backward, with a full memory."""
    zero_stage: int
    max_ranks: int | None
    """The number of lanes; None if lanes grow with the ranks."""
    scales: list[ScaleEstimate]
    limits: list[Limit]


def scale_to_json(scale: ScaleEstimate) -> dict[str, Any]:
    """All fields, and the sums that are properties of their parts."""
    content = asdict(scale)
    for number, stage in scale.stages.items():
        content["stages"][number]["memory"]["device"] = stage.memory.device
        content["stages"][number]["step"]["total"] = stage.step.total
    return content


def estimate_run(
    config: RunConfig, facts: DataFacts, *, gpus: Sequence[int], assumptions: Assumptions
) -> RunEstimate:
    """Estimate `config` on each number of GPUs. Raises ConfigError for more GPUs than lanes."""
    estimator = _Estimator(config, facts, assumptions)
    estimator.require_legal(max(gpus))
    scales = [estimator.scale(num_gpus) for num_gpus in gpus]
    return RunEstimate(
        num_parameters=estimator.model.num_parameters,
        flops_per_token=estimator.flops_per_token,
        zero_stage=config.deepspeed.zero_stage,
        max_ranks=None if assumptions.lanes_per_gpu else config.data.num_lanes,
        scales=scales,
        limits=estimator.limits(),
    )


class _Estimator:
    def __init__(self, config: RunConfig, facts: DataFacts, assumptions: Assumptions) -> None:
        try:
            model = replace(config.model, vocab_size=facts.vocab_size)
        except ValueError as error:
            raise ConfigError(f"model, with {facts.vocab_size:,} token ids: {error}") from None
        self._config = config.model_copy(update={"model": model})
        self._facts, self._assumptions = facts, assumptions
        self._models: dict[int, ModelNeeds] = {}

    # --- shapes ---------------------------------------------------------------------------------

    def require_legal(self, gpus: int) -> None:
        lanes = self._num_lanes(gpus)
        if gpus > lanes:
            raise ConfigError(
                f"{gpus} GPUs for data.num_lanes={lanes}: every rank needs a lane, so this config "
                f"runs on 1 to {lanes} GPUs. To estimate a larger batch, add data.num_lanes="
                f"{gpus}, or --lanes-per-gpu 1 for a batch that grows with the GPUs"
            )

    def _num_lanes(self, gpus: int) -> int:
        per_gpu = self._assumptions.lanes_per_gpu
        return self._config.data.num_lanes if per_gpu is None else per_gpu * gpus

    def _rows(self, gpus: int) -> tuple[int, int]:
        """Rows of a micro-batch, and micro-batches of a step."""
        rows = math.ceil(self._num_lanes(gpus) / gpus)
        micro_batch_rows = min(rows, self._config.training.micro_batch_lanes or rows)
        return micro_batch_rows, math.ceil(rows / micro_batch_rows)

    @property
    def model(self) -> ModelNeeds:
        """For what does not depend on the rows. Call `scale` before."""
        return next(iter(self._models.values()))

    def _model_with(self, micro_batch_rows: int) -> ModelNeeds:
        """The dry run of a micro-batch. It takes seconds, so it is done once per size."""
        if micro_batch_rows not in self._models:
            self._models[micro_batch_rows] = dry_run(
                self._config, micro_batch_rows=micro_batch_rows, device=self._assumptions.device
            )
        return self._models[micro_batch_rows]

    @property
    def _memory_elements_per_lane(self) -> int:
        state = memory_kind(self._config.model).empty(1, device="meta")
        return sum(tensor.numel() for tensor in state.row(0).values())

    @property
    def flops_per_token(self) -> float:
        """Forward and backward, with full memory."""
        lanes, tgt_len = self._config.data.num_lanes, self._config.data.tgt_len
        tails = tail_rows(self._config.model, num_tokens=lanes * tgt_len)
        flops = training_flops(
            self._config.model, num_lanes=lanes, tgt_len=tgt_len, tail_rows=tails
        )
        return flops / (lanes * tgt_len)

    # --- estimates ------------------------------------------------------------------------------

    def scale(self, gpus: int) -> ScaleEstimate:
        lanes, (rows, micro_batches) = self._num_lanes(gpus), self._rows(gpus)
        stages = {stage: self._stage(gpus, stage) for stage in self._legal_stages()}
        step_seconds = stages[self._config.deepspeed.zero_stage].step.total
        tokens_per_second = lanes * self._config.data.tgt_len / step_seconds
        saving = self._saving(gpus, step_seconds)
        steps = self._facts.steps_of_run(tokens_per_step=lanes * self._config.data.tgt_len)
        rate = self._facts.compressed_bytes_per_token
        days = None if steps is None else steps * step_seconds / DAY_SECONDS
        return ScaleEstimate(
            gpus=gpus,
            num_lanes=lanes,
            num_steps=steps,
            lanes_per_rank=math.ceil(lanes / gpus),
            micro_batches=micro_batches,
            padded_share=1 - lanes / (rows * micro_batches * gpus),
            stages=stages,
            step_seconds=step_seconds,
            tokens_per_second=tokens_per_second,
            days=days,
            days_with_failures=None if days is None else days / saving.goodput,
            data_bytes_per_second=None if rate is None else rate * tokens_per_second / gpus,
            saving=saving,
        )

    def _legal_stages(self) -> list[int]:
        optimizer = self._config.optimizer
        return [stage for stage in STAGES if not any(optimizer.problems_at_stage(stage))]

    def _stage(self, gpus: int, stage: int) -> StageEstimate:
        memory = self._memory(gpus, stage)
        collectives = self._collectives(gpus, stage)
        return StageEstimate(
            memory=memory,
            bytes_sent=sum(each.bytes_sent(gpus) for each in collectives),
            step=self._step(gpus, stage),
        )

    def _memory(self, gpus: int, stage: int) -> MemoryUse:
        training, (rows, micro_batches) = self._config.training, self._rows(gpus)
        on_cpu = self._assumptions.device == "cpu"
        element_bytes = 2 if training.memory_dtype == "bf16" else 4
        return RankMemory(
            model=self._model_with(rows),
            zero=self._zero(gpus, stage),
            num_ranks=gpus,
            num_micro_batches=micro_batches,
            lane_bytes=rows * micro_batches * self._memory_elements_per_lane * element_bytes,
            lanes_on_host=training.memory_device == "cpu" and not on_cpu,
            copies_to_reduce=on_cpu,
        ).peak()

    def _collectives(self, gpus: int, stage: int) -> list[Collective]:
        _, micro_batches = self._rows(gpus)
        return list(
            collectives_of_step(
                self.model, self._zero(gpus, stage), num_micro_batches=micro_batches
            )
        )

    def _zero(self, gpus: int, stage: int) -> ZeroSettings:
        on_gpu = self._assumptions.device == "cuda"
        return ZeroSettings.of(self._config.deepspeed, num_ranks=gpus, on_gpu=on_gpu, stage=stage)

    def _step(self, gpus: int, stage: int) -> StepTime:
        rows, micro_batches = self._rows(gpus)
        return step_time(
            self._collectives(gpus, stage),
            compute_seconds=self._compute_seconds(rows, micro_batches),
            num_ranks=gpus,
            links=self._assumptions.links,
        )

    def _compute_seconds(self, rows: int, micro_batches: int) -> float:
        # Recomputing is a second forward, a third of forward and backward.
        recompute = 4 / 3 if self._config.training.activation_checkpointing else 1.0
        tokens = rows * micro_batches * self._config.data.tgt_len
        peak = self._assumptions.peak_flops(self._config.precision)
        products = tokens * self.flops_per_token * recompute / peak / self._assumptions.utilisation
        # Launches run ahead of the device, unless its operations are shorter.
        launches = micro_batches * self.model.num_kernels * self._assumptions.kernel_seconds
        return max(products, launches)

    def _checkpoint_size(self, gpus: int) -> CheckpointSize:
        return checkpoint_size(
            self.model,
            zero_stage=self._config.deepspeed.zero_stage,
            num_ranks=gpus,
            num_lanes=max(gpus, self._num_lanes(gpus)),
            memory_elements_per_lane=self._memory_elements_per_lane,
        )

    def _saving(self, gpus: int, step_seconds: float) -> SavingEstimate:
        assumptions, training = self._assumptions, self._config.training
        size = self._checkpoint_size(gpus)
        save = size.bytes_per_rank / (assumptions.copy_gbytes_per_second * 1e9)
        write = size.num_bytes / (assumptions.storage_gbytes_per_second * 1e9)
        nodes = math.ceil(gpus / assumptions.links.gpus_per_node)
        mtbf = assumptions.node_mtbf_hours * HOUR_SECONDS / nodes
        interval = training.checkpoint_interval_steps * step_seconds
        if training.checkpoint_interval_minutes is not None:
            interval = min(interval, 60 * training.checkpoint_interval_minutes)
        # A save also waits for the previous one to be written.
        best = max(write, best_interval_seconds(save_seconds=save, mtbf_seconds=mtbf))
        # A failure while files are written loses the interval before them too.
        restart = assumptions.restart_seconds + write
        failures = {"restart_seconds": restart, "mtbf_seconds": mtbf}
        return SavingEstimate(
            size=size,
            save_seconds=save,
            write_seconds=write,
            interval_seconds=interval,
            best_interval_steps=max(1, round(best / step_seconds)),
            mtbf_seconds=mtbf,
            goodput=goodput(
                interval_seconds=interval,
                save_seconds=save + max(0.0, write - interval),
                **failures,
            ),
            best_goodput=goodput(interval_seconds=best, save_seconds=save, **failures),
        )

    def limits(self) -> list[Limit]:
        stage = self._config.deepspeed.zero_stage

        def exposed_share(gpus: int) -> float:
            step = self._step(gpus, stage)
            return step.exposed / step.total

        def save_share(gpus: int) -> float:
            saving = self._saving(gpus, self._step(gpus, stage).total)
            return saving.write_seconds / saving.interval_seconds

        per_gpu = self._assumptions.lanes_per_gpu
        return limits_of_run(
            num_lanes=self._config.data.num_lanes if per_gpu is None else None,
            manifest_bytes=lambda gpus: self._checkpoint_size(gpus).manifest_bytes,
            save_share_of_interval=save_share,
            exposed_share=exposed_share,
            lines_per_second=lambda gpus: (
                1 / (self._step(gpus, stage).total * self._config.training.log_interval_steps)
            ),
        )
