"""The sections `training`, `divergence`, `evaluation`, `tracking`, `ray` and `deepspeed`.

DeepSpeed ignores top-level keys that it does not know, so a typo would be silent. Other settings
decide the value of most keys, and some change the numbers: `extra` takes only those that do not.
"""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from txl_dist.config.data_config import Section


class TrainingConfig(Section):
    """Length of the run, micro-batches, logging and checkpoints."""

    num_steps: int = Field(ge=1)
    """Optimizer steps of the whole run, those before a resume included. A step reads the lanes of a
    step x `data.tgt_len` tokens; `txl train --dry-run` says how many steps an epoch has."""
    micro_batch_lanes: int | None = Field(default=None, ge=1)
    """Lanes per micro-batch of a rank; null: all its lanes. Changes the speed and the bytes of
    activations only."""
    log_interval_steps: int = Field(default=10, ge=1)
    """Steps between two step lines; the last step always has one."""
    checkpoint_interval_steps: int = Field(default=500, ge=1)
    """Steps between two checkpoints; the last step and a stop request always save one."""
    checkpoint_interval_minutes: float | None = Field(default=None, gt=0)
    """Also save when this time has passed since the last checkpoint; null: by steps only."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep, in addition to the best one."""
    keep_interval_steps: int | None = Field(default=None, ge=1)
    """Also keep every checkpoint whose step is a multiple of this; null: none."""
    checkpoint_url: str | None = Field(default=None, pattern=r"^(s3|gs)://[^/]")
    """Also copy checkpoints and metrics to this s3:// or gs:// URL, and resume from there if the
    run directory has no newer checkpoint; null: no copies. One URL per run."""
    rank_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long others wait for a rank that does not respond: a rank in a collective or for
    background work of all ranks, and the launcher, 10 seconds longer, if none of them responds."""
    grace_seconds: float = Field(default=25.0, gt=0)
    """How long a stop request waits for the step and its checkpoint; then the run ends without that
    checkpoint. The end of a run waits as long for MLflow. The default is 5 seconds less than what
    Kubernetes grants by default."""
    backprop_segments: int = Field(default=1, ge=1)
    """Read the `data.tgt_len` tokens of a step in this many equal segments; gradients pass through
    the memory from one to the next. 1: they stop at every segment, as in the paper."""
    deterministic: bool = False
    """On GPUs: only operations that repeat bit for bit, so that two runs have equal weights. Slower
    and with more GPU memory. On CPUs this holds in any case."""
    compile: bool | Literal["without_graphs"] = False
    """Compile the layers with torch.compile at the start, a minute or more; stages 0 to 2. `true`
    also records them on GPUs as CUDA graphs, except with `activation_checkpointing` and several
    `backprop_segments`; `without_graphs` does not."""
    activation_checkpointing: bool = False
    """Compute each layer's activations again in backward: fewer bytes, more time, same numbers."""
    memory_dtype: Literal["fp32", "bf16"] = "fp32"
    """Storage of the recurrent memory. bf16 takes half the bytes and rounds the hidden states."""


EVENT_STEPS = 1000
"""Number of the latest steps in which events of divergence are counted."""


class DivergenceConfig(Section):
    """Which steps count as divergence, and what follows.

    A loss or gradient norm that is NaN or infinite always counts. A spike counts if its threshold
    is set: a value above median + threshold * deviation of the last `window_steps` accepted steps.
    The deviation is 1.4826 * the median absolute deviation, which for normally distributed values
    is the standard deviation, and at least 1 % of the median. All ranks agree before the update.
    """

    policy: Literal["stop", "skip", "rollback"] = "stop"
    """`stop` ends the run with exit code 5. `skip` discards the update and continues with the next
    segment. `rollback` returns to the newest good checkpoint, and continues without this
    step and the last update before it."""
    loss_spike: float | None = Field(default=None, gt=0)
    """Threshold of the training loss, in deviations above the median, such as 10; null: none."""
    gradient_spike: float | None = Field(default=None, gt=0)
    """Threshold of the gradient norm before clipping, such as 20; null: none."""
    window_steps: int = Field(default=100, ge=5, le=10_000)
    """Accepted steps that a spike is compared with. With fewer steps, nothing is a spike."""
    max_events: int = Field(default=10, ge=1, lt=EVENT_STEPS)
    """Events that `skip` and `rollback` tolerate within the last 1,000 steps; the next one ends the
    run with exit code 5."""


class EvaluationConfig(Section):
    """Evaluation during training, in `exact` mode: every `interval_steps`, and at the end."""

    split: str | None = "auto"
    """A split of the first corpus of `data` that has it. `auto`: `valid`, if there is one. null:
    the ranks evaluate nothing; `txl eval --watch` can score the checkpoints during training."""
    interval_steps: int = Field(default=500, ge=1)
    """Steps between two evaluations; the last step always has one."""
    batch_chunks: int = Field(default=8, ge=1)
    """Chunks (parts of the split that are scored independently) per batch, on each rank. Changes
    speed and memory, and scores by rounding only."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Score only this many tokens from the start of the split; null: all of it."""


class TrackingConfig(Section):
    """MLflow. Training never waits for it, and continues if it fails."""

    enabled: bool = True
    """Whether metrics are sent to MLflow; `metrics.jsonl` is written in either case."""
    uri: str | None = Field(default=None, pattern=r"^(?!file:)[a-z][a-z0-9+.-]*://")
    """A server or database, such as sqlite:///PATH/mlflow.db or http://HOST:PORT; null: `mlflow.db`
    in the parent of the run directory. MLflow no longer has a file store."""
    experiment: str = Field(
        default="txl", max_length=250, pattern=r"^(?!(.*/)?\.\.(/|$))[\w/][\w .:@/+-]*\Z"
    )
    """Name of the MLflow experiment that contains the run."""


class RayConfig(Section):
    """Restarts, timeouts and placement of ranks with `--on ray` and `--on ADDRESS`."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts from the newest checkpoint after failures of ranks, without a new checkpoint between
    them. A lost or drained node does not count; `--max-restarts` overrides it."""
    start_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long Ray may take to start the ranks, at first and after a rank died."""
    gpus_per_rank: int | None = Field(default=None, ge=0, le=1)
    """GPUs that a rank reserves. 0: ranks use CPUs, one each, and GPUs are hidden from them. null:
    1 if the cluster has GPUs, else 0."""
    growth_interval_seconds: float = Field(default=600.0, ge=0)
    """With `--ranks A:B`: the least time between the start of the ranks and a restart with more of
    them, after nodes have joined. A restart takes about half a minute."""


GPU_BUCKET_SIZE = 25_000_000
"""Elements of a reduction on GPUs (100 MB). DeepSpeed's default of 500 million is more than most of
our models have, so nothing would be reduced before the end of backward, and takes 2 GB."""
REFUSED_ZERO_KEYS = {
    "stage": "deepspeed.zero_stage decides it",
    "offload_optimizer": "deepspeed.offload decides it",
    "offload_param": "deepspeed.offload decides it",
    "round_robin_gradients": "DeepSpeed 0.19.8 then mixes up which part of the optimizer state "
    "belongs to which parameter, so checkpoints would be wrong",
    "zenflow": "it has another optimizer state, which checkpoints do not contain",
}
"""Keys of `zero_optimization` that are refused, and why."""

ExtraKey = Literal[
    "zero_optimization",
    "communication_data_type",
    "comms_logger",
    "flops_profiler",
    "memory_breakdown",
    "wall_clock_breakdown",
]


class DeepSpeedConfig(Section):
    """The ZeRO stage, and DeepSpeed options that no setting of ours decides."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ranks shard: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What is kept on the host: optimizer state (stages 1-3), or also parameters (stage 3)."""
    extra: dict[ExtraKey, Any] = Field(default={})
    """Merged into DeepSpeed's JSON: `zero_optimization` without what `zero_stage` and `offload`
    decide, `communication_data_type`, and reports such as `comms_logger`."""

    @field_validator("extra")
    @classmethod
    def _reject_owned_keys(cls, extra: dict[ExtraKey, Any]) -> dict[ExtraKey, Any]:
        zero = extra.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError(f"zero_optimization={zero!r} must be a mapping")
        if problems := [
            f"zero_optimization.{key} is not supported: {reason}; remove it"
            for key, reason in REFUSED_ZERO_KEYS.items()
            if key in zero
        ]:
            raise ValueError("\n".join(problems))
        return extra

    @model_validator(mode="after")
    def _reject_ignored_offload(self) -> Self:
        if self.offload == "optimizer" and self.zero_stage == 0:
            raise ValueError(
                "offload=optimizer at zero_stage=0 would be ignored: there is no partition to "
                "move. Use zero_stage 1, 2 or 3"
            )
        if self.offload == "parameters" and self.zero_stage < 3:
            raise ValueError(
                f"offload=parameters at zero_stage={self.zero_stage} would be ignored: DeepSpeed "
                "moves parameters at stage 3 only. Use zero_stage=3, or offload=optimizer"
            )
        return self

    def computed_stage(self, *, num_ranks: int, on_gpu: bool) -> int:
        """The stage whose code runs: 0 instead of 1 and 2 on one GPU, where they shard nothing.

        The copies of these stages take 1 to 6 ms of a GPU's step. Without clipping the numbers are
        equal, with it the factor is rounded differently; so CPUs keep the stage. Options in `extra`
        and `offload` are for the stage that was set.
        """
        shards_nothing = num_ranks == 1 and on_gpu and self.zero_stage in (1, 2)
        if shards_nothing and self.offload == "none" and not self.extra:
            return 0
        return self.zero_stage

    def reduction(self, *, stage: int, num_ranks: int, on_gpu: bool) -> dict[str, Any]:
        """`extra.zero_optimization`, with our defaults for GPUs (docs/decisions/0039)."""
        defaults: dict[str, Any] = {}
        if on_gpu and stage > 0:
            # Not at stage 2: DeepSpeed 0.19.8 frees a gradient that is larger than the bucket while
            # its other stream still reduces it (average_tensor in stage_1_and_2.py).
            overlaps = num_ranks > 1 and stage != 2
            defaults = {"overlap_comm": overlaps, "reduce_bucket_size": GPU_BUCKET_SIZE}
        return {**defaults, **self.extra.get("zero_optimization", {})}
