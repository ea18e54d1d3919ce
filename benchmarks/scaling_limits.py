"""Where the design stops scaling: communication, checkpoints and failures of a run on many GPUs.

    python benchmarks/scaling_limits.py CONFIG [k.e.y=value ...] --gpus 8,64,512 [--lanes-per-gpu 8]
        [--node-gbit 3200] [--peak-tflops 989] [--utilisation 0.361] [--keep 0.9]

With --keep, only the smallest steps in which a GPU computes for that share of the time, by number
of GPUs, ZeRO stage and overlap. --utilisation is the share of the peak that was measured for steps
of the model on one GPU.

Everything follows from sizes and from assumed machines, links and storage, which are options, and
constants of this file and of `collective_times.py`; docs/scaling.md shows the result for one
config. Each limit is a quantity that grows with the number of ranks, with the value above which it
is a problem.

With P parameters, O elements of optimizer state and the memory of all lanes, a checkpoint holds
4 P + 4 O bytes and the memory in fp32, whatever the number of ranks; every rank copies and writes
an equal part. Training waits for the copy to the host only. The files are written in the
background, and the next save waits for them.

Sources: J. W. Young 1974, "A first order approximation to the optimum checkpoint interval", CACM
17(9); J. T. Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
dumps", FGCS 22(3), equations 20 (wall time) and 37 (interval).
"""

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from collective_times import Links, StepTime, collectives_of_step, step_time

from txl_dist.config.config_file import load_run_config
from txl_dist.config.run_config import RunConfig
from txl_dist.config.training_config import DeepSpeedConfig
from txl_dist.estimate.dry_run import dry_run
from txl_dist.estimate.rank_bytes import FP32_BYTES, ModelNeeds, ZeroSettings
from txl_dist.estimate.run_estimate import A100_TFLOPS, UTILISATION, flops_per_token, with_data
from txl_dist.runtime.stop import FILE_SECONDS
from txl_dist.runtime.waiting import BEAT_SECONDS, NUM_READERS

STORAGE_BYTES_PER_SECOND = 2e9
"""Rate at which all ranks together write checkpoints."""
COPY_BYTES_PER_SECOND = 10e9
"""Copy rate from a GPU to host memory; a save stops training for this copy."""
NODE_MTBF_SECONDS = 6000 * 3600.0
"""Mean time between failures of one node. Llama 3 had 419 unexpected interruptions in 54 days on
2,048 nodes: 6,300 hours (arXiv:2407.21783, section 3.3.4)."""
RESTART_SECONDS = 120.0
"""Time from a failure to the first step after it."""
FILE_OPERATIONS_PER_SECOND = 1000.0
"""Rate that a shared file system's metadata server handles easily; an assumption."""
FILE_LATENCY_SECONDS = 0.5e-3
"""Latency of one such operation; an assumption."""
JSON_BYTES_PER_SECOND = 20e6
"""Rate at which rank 0 parses and checks the parts of a manifest."""
POINTS_PER_LINE = 12
"""Numbers in a step line of metrics.jsonl, each a point in MLflow."""
POINTS_PER_SECOND = 100.0
"""Rate that a tracking server handles easily; an assumption."""
LARGEST_SEARCHED = 2**20
MOST_ROWS = 2048
"""Of one GPU, searched by --keep."""
# Bytes of the JSON entries of a manifest without their numbers and names, as `manifest_bytes`
# indents them.
SLICE_BYTES = 55
PARAMETER_BYTES = 70
FILE_BYTES = 141
LANE_BYTES = 4
HEADER_BYTES = 6_000
"""Settings, state and digests, about; they do not grow with the ranks."""
FILES_PER_RANK = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSize:
    """One checkpoint."""

    num_bytes: int
    bytes_per_rank: int
    """Copied to the memory of the host and written, by the rank with most lanes."""
    num_files: int
    num_slices: int
    """Entries of the manifest: parts of parameters."""
    manifest_bytes: int
    """Written and read by rank 0 alone."""


def checkpoint_size(
    model: ModelNeeds,
    *,
    zero_stage: int,
    num_ranks: int,
    num_lanes: int,
    memory_elements_per_lane: int,
) -> CheckpointSize:
    """Size of a checkpoint. Raises nothing; `num_lanes` is at least `num_ranks`."""
    model_bytes = FP32_BYTES * (model.num_parameters + model.num_states)
    lane_bytes = FP32_BYTES * memory_elements_per_lane
    lanes_per_rank = math.ceil(num_lanes / num_ranks)
    slices = _num_slices(model, zero_stage=zero_stage, num_ranks=num_ranks)
    return CheckpointSize(
        num_bytes=model_bytes + lane_bytes * num_lanes,
        bytes_per_rank=math.ceil(model_bytes / num_ranks) + lane_bytes * lanes_per_rank,
        num_files=FILES_PER_RANK * num_ranks + 2,
        num_slices=slices,
        manifest_bytes=_manifest_bytes(model, slices, num_ranks=num_ranks, num_lanes=num_lanes),
    )


def _num_slices(model: ModelNeeds, *, zero_stage: int, num_ranks: int) -> int:
    if zero_stage in (1, 2):  # one cut between two ranks, in each of the flat groups
        return len(model.parameters) + num_ranks - 1
    # Every parameter is cut into a part for every rank.
    return sum(min(num_ranks, parameter.num_elements) for parameter in model.parameters)


def _manifest_bytes(model: ModelNeeds, slices: int, *, num_ranks: int, num_lanes: int) -> int:
    rank_digits = len(str(num_ranks - 1))
    mean_elements = model.num_parameters / len(model.parameters)
    offset_digits = len(str(int(mean_elements / 2)))
    names = sum(len(parameter.name) for parameter in model.parameters)
    return (
        HEADER_BYTES
        + slices * (SLICE_BYTES + rank_digits + 2 * offset_digits)
        + len(model.parameters) * PARAMETER_BYTES
        + names
        + num_ranks * FILES_PER_RANK * FILE_BYTES
        + num_lanes * (LANE_BYTES + rank_digits)
    )


def best_interval_seconds(*, save_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between two saves that lose least time (Daly, equation 37).

    `save_seconds`: for which one save stops training; `mtbf_seconds`: mean time between failures
    of the whole run. Young's sqrt(2 save mtbf) is its first term.
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = math.sqrt(save_seconds / (2 * mtbf_seconds))
    first = math.sqrt(2 * save_seconds * mtbf_seconds)
    return first * (1 + ratio / 3 + ratio**2 / 9) - save_seconds


def goodput(
    *, interval_seconds: float, save_seconds: float, restart_seconds: float, mtbf_seconds: float
) -> float:
    """Share of the wall time that is progress, with failures at random (Daly, equation 20)."""
    wall = (
        mtbf_seconds
        * math.exp(min(700.0, restart_seconds / mtbf_seconds))
        * math.expm1(min(700.0, (interval_seconds + save_seconds) / mtbf_seconds))
    )
    return interval_seconds / wall


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A quantity that grows with the number of ranks."""

    name: str
    unit: str
    threshold: float
    advice: str
    value: Callable[[int], float]

    @property
    def first_ranks(self) -> int | None:
        """The smallest number of ranks above the threshold; None: none up to a million."""
        low, high = 0, 1
        while self.value(high) <= self.threshold:
            low, high = high, 2 * high
            if high > LARGEST_SEARCHED:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.value(middle) > self.threshold else (middle, high)
        return high


def limits_of_run(
    *,
    num_lanes: int | None,
    manifest_bytes: Callable[[int], float],
    save_share_of_interval: Callable[[int], float],
    exposed_share: Callable[[int], float],
    lines_per_second: Callable[[int], float],
) -> list[Limit]:
    """All limits of a run. `num_lanes`, of a step, is None if lanes grow with the ranks.

    `save_share_of_interval`: seconds to write a checkpoint / seconds between two of them.
    `exposed_share`: share of a step in which a rank waits for communication. `lines_per_second`:
    step lines of the log.
    """
    limits = [
        Limit(
            name="heartbeats and the stop file, operations",
            unit="per second",
            threshold=FILE_OPERATIONS_PER_SECOND,
            # All ranks write heartbeats and look for the stop file; few read heartbeats, while they
            # wait for others.
            advice="put the run directory on a fast file system",
            value=lambda ranks: ranks * ((1 + NUM_READERS) / BEAT_SECONDS + 1 / FILE_SECONDS),
        ),
        Limit(
            name="rank 0 reads the parts of a checkpoint",
            unit="seconds",
            threshold=10.0,
            advice="in the background of a save; use ZeRO 1 or 2, or a faster file system",
            # One poll and one read per rank; its JSON is about its part of the manifest.
            value=lambda ranks: (
                2 * FILE_LATENCY_SECONDS * ranks + manifest_bytes(ranks) / JSON_BYTES_PER_SECOND
            ),
        ),
        Limit(
            name="writing a checkpoint",
            unit="of the interval",
            threshold=1.0,
            advice="increase training.checkpoint_interval_steps: the next save waits",
            value=save_share_of_interval,
        ),
        Limit(
            name="waiting for communication",
            unit="of a step",
            threshold=0.5,
            advice="more lanes per rank, faster links, or another ZeRO stage",
            value=exposed_share,
        ),
        Limit(
            name="MLflow points",
            unit="per second",
            threshold=POINTS_PER_SECOND,
            # Of rank 0 only: they grow with the rate of steps, not with the ranks.
            advice="increase training.log_interval_steps",
            value=lambda ranks: POINTS_PER_LINE * lines_per_second(ranks),
        ),
    ]
    if num_lanes is not None:
        lanes = Limit(
            name="lanes",
            unit="ranks per lane",
            threshold=1.0,
            advice="every rank needs a lane; increase data.num_lanes",
            value=lambda ranks: ranks / num_lanes,
        )
        limits.insert(0, lanes)
    return limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """One run on one number of GPUs."""

    step: StepTime
    size: CheckpointSize
    save_seconds: float
    write_seconds: float
    interval_seconds: float
    best_interval_seconds: float
    goodput: float


class ScaledRun:
    """Computes a `Scale` for any number of GPUs."""

    def __init__(
        self,
        config: RunConfig,
        *,
        lanes_per_gpu: int | None,
        peak_tflops: float,
        utilisation: float = UTILISATION,
        links: Links,
    ) -> None:
        self.config = with_data(config)
        self.lanes_per_gpu, self.links = lanes_per_gpu, links
        self.model = dry_run(self.config, micro_batch_rows=1, device="cuda")
        self.flops_per_second = peak_tflops * 1e12 * utilisation
        self.flops_per_token = flops_per_token(self.config)

    def num_rows(self, gpus: int) -> int:
        """Lanes of a step, on all GPUs: at least one for each."""
        return max(gpus, (self.lanes_per_gpu or 0) * gpus or self.config.data.rows)

    def checkpoint(self, gpus: int) -> CheckpointSize:
        shape = self.config.model
        return checkpoint_size(
            self.model,
            zero_stage=self.config.deepspeed.zero_stage,
            num_ranks=gpus,
            num_lanes=self.num_rows(gpus) * self.config.data.num_turns,
            memory_elements_per_lane=shape.n_layer * shape.mem_len * shape.d_model,
        )

    def step(
        self, gpus: int, *, rows: int | None = None, deepspeed: DeepSpeedConfig | None = None
    ) -> StepTime:
        """With the rows per GPU and the settings of DeepSpeed of the config, or with others."""
        config = self.config
        rows = rows or math.ceil(self.num_rows(gpus) / gpus)
        micro_batches = math.ceil(rows / min(rows, config.training.micro_batch_lanes or rows))
        flops = rows * config.data.tgt_len * self.flops_per_token
        zero = ZeroSettings.of(deepspeed or config.deepspeed, num_ranks=gpus, on_gpu=True)
        return step_time(
            list(collectives_of_step(self.model, zero, num_micro_batches=micro_batches)),
            compute_seconds=flops / self.flops_per_second,
            num_ranks=gpus,
            links=self.links,
        )

    def scale(self, gpus: int) -> Scale:
        step, size, training = self.step(gpus), self.checkpoint(gpus), self.config.training
        save = size.bytes_per_rank / COPY_BYTES_PER_SECOND
        write = size.num_bytes / STORAGE_BYTES_PER_SECOND
        mtbf = NODE_MTBF_SECONDS / math.ceil(gpus / self.links.gpus_per_node)
        interval = training.checkpoint_interval_steps * step.total
        # A save also waits for the previous one to be written.
        best = max(write, best_interval_seconds(save_seconds=save, mtbf_seconds=mtbf))
        return Scale(
            step=step,
            size=size,
            save_seconds=save,
            write_seconds=write,
            interval_seconds=interval,
            best_interval_seconds=best,
            goodput=goodput(
                interval_seconds=interval,
                save_seconds=save + max(0.0, write - interval),
                # A failure while files are written loses the interval before them too.
                restart_seconds=RESTART_SECONDS + write,
                mtbf_seconds=mtbf,
            ),
        )

    def limits(self) -> list[Limit]:
        return limits_of_run(
            num_lanes=None if self.lanes_per_gpu else self.config.data.rows,
            manifest_bytes=lambda gpus: self.checkpoint(gpus).manifest_bytes,
            save_share_of_interval=lambda gpus: (
                self.scale(gpus).write_seconds / self.scale(gpus).interval_seconds
            ),
            exposed_share=lambda gpus: self.step(gpus).exposed / self.step(gpus).total,
            lines_per_second=lambda gpus: (
                1 / (self.step(gpus).total * self.config.training.log_interval_steps)
            ),
        )


def main() -> None:
    """Print the tables, one column per number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--gpus", default="8,64,512")
    parser.add_argument("--lanes-per-gpu", type=int)
    parser.add_argument("--node-gbit", type=float, default=Links().node_gbit)
    parser.add_argument("--intra-node-gbit", type=float, default=Links().intra_node_gbit)
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--utilisation", type=float, default=UTILISATION)
    parser.add_argument("--keep", type=float, help="share of a step that is computation")
    words = parser.parse_args()
    config = load_run_config(words.config, words.overrides)
    run = ScaledRun(
        config,
        lanes_per_gpu=words.lanes_per_gpu,
        peak_tflops=words.peak_tflops or A100_TFLOPS[config.precision],
        utilisation=words.utilisation,
        links=Links(node_gbit=words.node_gbit, intra_node_gbit=words.intra_node_gbit),
    )
    numbers = [int(word) for word in words.gpus.split(",")]
    if words.keep:
        print_steps_that_keep(run, words.keep, numbers)
        return
    scales = [run.scale(gpus) for gpus in numbers]
    print_row("GPUs", map(str, numbers))
    print_row("step, seconds", (f"{each.step.total:.3g}" for each in scales))
    print_row("  waiting for communication", (f"{each.step.exposed:.3g}" for each in scales))
    print_row("checkpoint, GB", (f"{each.size.num_bytes / 1e9:.3g}" for each in scales))
    print_row("  files", (str(each.size.num_files) for each in scales))
    print_row("  training stops for, seconds", (f"{each.save_seconds:.3g}" for each in scales))
    print_row("  written after, seconds", (f"{each.write_seconds:.3g}" for each in scales))
    print_row("  interval, seconds", (f"{each.interval_seconds:.3g}" for each in scales))
    print_row("  best interval, seconds", (f"{each.best_interval_seconds:.3g}" for each in scales))
    print_row("goodput with failures", (f"{each.goodput:.2%}" for each in scales))
    for limit in run.limits():
        print_row(f"{limit.name}, {limit.unit}", (f"{limit.value(n):.3g}" for n in numbers))
        if limit.first_ranks is not None:
            print(
                f"  above {limit.threshold:g} from {limit.first_ranks:,} ranks on: {limit.advice}"
            )


def print_steps_that_keep(run: ScaledRun, share: float, numbers: list[int]) -> None:
    """Rows per GPU of the smallest step that computes for `share` of its time, and its tokens."""
    for stage, overlap in ((0, False), (1, False), (1, True), (2, False), (3, True)):
        zero = {"zero_optimization": {"overlap_comm": overlap}} if stage else {}
        deepspeed = DeepSpeedConfig(zero_stage=stage, extra=zero)
        cells = []
        for gpus in numbers:
            rows = fewest_rows(run, share, gpus, deepspeed)
            tokens = rows * gpus * run.config.data.tgt_len / 1e6
            cells.append(f"{rows} ({tokens:,.2f} M)" if rows <= MOST_ROWS else "none")
        print_row(f"stage {stage}{', overlap' * overlap}", (f"{cell:>18}" for cell in cells))


def fewest_rows(run: ScaledRun, share: float, gpus: int, deepspeed: DeepSpeedConfig) -> int:
    """The fewest rows per GPU with which a step computes for `share` of its time.

    More rows make the share larger, except where they begin one more micro-batch, so each number is
    tried.
    """
    for rows in range(1, MOST_ROWS + 1):
        step = run.step(gpus, rows=rows, deepspeed=deepspeed)
        if step.compute >= share * step.total:
            return rows
    return MOST_ROWS + 1


def print_row(label: str, cells: Iterable[str]) -> None:
    print(f"{label:<48}" + "".join(f"{cell:>11}" for cell in cells))


if __name__ == "__main__":
    main()
