"""The sections `optimizer`, `training`, `divergence`, `evaluation`, `tracking`, `ray`, `deepspeed`.

DeepSpeed ignores top-level keys that it does not know, so a typo would be silent. Other settings
decide the value of most keys, and some change the numbers: `extra` takes only those that do not.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from txl_dist.config.data_config import Check, Section, refuse

SCRIPT_SCHEDULES = ("cosine", "inverse_sqrt", "constant")
"""Schedules that the training script of the paper also has."""
Role = Literal["hidden", "embedding", "head", "other"]
"""Of a parameter: weights of linear layers in layers; tables of the embedding and its projections;
weights and projections that only the softmax has; the rest, such as biases and norms."""
OPTIMIZER_RECIPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "modern": {
        "name": "muon",
        "lr": 8e-3,
        "schedule": "linear",
        "gradient_clipping": 0.0,
    },
}
"""Defaults of this section by the value of `model.recipe`, where they differ from the paper's."""


class OptimizerConfig(Section):
    """The optimizer and the schedule of its learning rate."""

    name: Literal["adamw", "adam", "lamb", "muon"] = "adamw"
    """`adamw`; `adam`: weight decay is part of the gradient; `lamb`: ZeRO stage 0 only; `muon`:
    orthogonalised momentum for hidden matrices, AdamW for the rest, ZeRO stages 0 to 2 only."""
    # Defaults are those of the paper's base models: Adam, lr 2.5e-4, clipping at 0.25.
    lr: float = Field(default=2.5e-4, gt=0)
    """Learning rate after the warm-up, the highest of the run. With AdamW small models learn faster
    with 1e-3 or more, and need a warm-up then."""
    lr_factors: dict[Role, Annotated[float, Field(ge=0)]] = Field(default={})
    """Multiplies the learning rate of parameters by their role: `hidden`, `embedding`, `head` or
    `other`. A role that is not named has 1. With 0 its weights stay as they are: they have no
    gradient and no optimizer state. A table that is tied with the softmax is `embedding`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay per step of the running mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay per step of the running mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of the update, so that it is never 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of the matrices of linear layers and projections; not of embeddings, cluster
    weights of the softmax, position biases, LayerNorms and biases. Decoupled from the gradient,
    except with `adam`."""
    gradient_clipping: float = Field(default=0.25, ge=0)
    """Largest global L2 norm of the gradient; 0 does not clip."""
    averaging: Literal["asgd"] | None = None
    """`asgd`: evaluation uses, and checkpoints also contain, the mean of all weights since
    `averaging_start_step`. null: no average."""
    averaging_start_step: int = Field(default=1, ge=1)
    """The average begins with the weights after this update; skipped steps do not count."""
    schedule: Literal["cosine", "inverse_sqrt", "constant", "linear", "wsd"] = "cosine"
    """Learning rate after the warm-up. `cosine`: half a period down to `min_lr`. `linear`: a line
    down to `min_lr`. `inverse_sqrt`: `lr` x sqrt(warm-up steps / step). `constant`: `lr`. `wsd`:
    `lr`, then in the last `decay_steps` a line down to `min_lr` (warm-up, stable, decay)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which the learning rate rises linearly from 0 to `lr`. With a high rate
    and a short warm-up a model learns nothing: with AdamW take 200 for rates from 1e-3 on."""
    decay_steps: int | None = Field(default=None, ge=1)
    """`wsd` only: steps at the end of the run in which the learning rate falls to `min_lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate of the last step with `cosine`, `linear` and `wsd`."""
    schedule_of_paper_code: bool = False
    """Set the rate exactly as the training script of the paper does: update n has the rate of step
    n - 1, the first one the full `lr` even with a warm-up, the cosine spans all steps including the
    warm-up, and `inverse_sqrt` is `lr` / sqrt(step)."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        refuse(
            (
                self.schedule == "wsd" and self.decay_steps is None,
                "schedule=wsd needs decay_steps, the steps at the end in which the rate falls; "
                "a fifth of the run is usual",
            ),
            (
                self.schedule != "wsd" and self.decay_steps is not None,
                f"decay_steps={self.decay_steps} has no effect with schedule={self.schedule}; "
                "remove it, or use schedule=wsd",
            ),
            (
                self.schedule_of_paper_code and self.schedule not in SCRIPT_SCHEDULES,
                f"schedule={self.schedule} is not in the paper's code, so "
                "schedule_of_paper_code=true has no meaning; use "
                f"{', '.join(SCRIPT_SCHEDULES)}, or remove it",
            ),
        )
        return self

    def checks_with(self, *, num_steps: int) -> tuple[Check, ...]:
        """Whether the schedule fits into a run of `num_steps`."""
        warmup, decay = self.warmup_steps, self.decay_steps or 0
        return (
            (
                warmup > num_steps,
                f"optimizer.warmup_steps={warmup} is longer than training.num_steps={num_steps}; "
                "lower it",
            ),
            (
                warmup <= num_steps < warmup + decay,
                f"optimizer.warmup_steps={warmup} and optimizer.decay_steps={decay} are together "
                f"longer than training.num_steps={num_steps}; lower one",
            ),
            (
                self.min_lr > self.lr,
                f"optimizer.min_lr={self.min_lr} is above optimizer.lr={self.lr}; lower it",
            ),
            (
                self.averaging is not None and self.averaging_start_step > num_steps,
                f"optimizer.averaging_start_step={self.averaging_start_step} is after the end of "
                f"the run (training.num_steps={num_steps}), which would have no average; lower it",
            ),
        )

    def checks_at_stage(self, zero_stage: int) -> tuple[Check, ...]:
        """Whether the optimizer can run at this ZeRO stage."""
        at_stage = f"optimizer.name={self.name} at deepspeed.zero_stage={zero_stage}"
        return (
            (
                self.name == "lamb" and zero_stage > 0,
                f"{at_stage} is not supported: LAMB needs the norms of whole parameters, and ZeRO "
                "gives a rank only parts of them. Use deepspeed.zero_stage=0, or another optimizer",
            ),
            (
                self.name == "muon" and zero_stage > 2,
                f"{at_stage} is not supported: Muon needs whole matrices, and stage 3 cuts every "
                "one of them. Use deepspeed.zero_stage=2, or another optimizer",
            ),
        )

    def rate_warnings(self, *, d_model: int) -> Iterator[str]:
        """A message if the rate is of the size that another optimizer needs.

        It then probably comes from a file for that one. Shipped configs have rates of 1.0 to 1.5 /
        d_model with Muon, and up to 0.26 / d_model with AdamW.
        """
        if self.name == "muon" and self.lr < 0.4 / max(d_model, 128):
            advice = "a rate of AdamW's size: Muon learns little with it. Its rate is about"
        elif self.name in ("adam", "adamw") and self.lr > 0.64 / min(d_model, 128):
            advice = f"a rate of Muon's size: with it, {self.name} often learns nothing. Take a"
            advice += " quarter of it, or optimizer.name=muon. Muon's rate is about"
        else:
            return
        yield (
            f"optimizer.lr={self.lr:g} with optimizer.name={self.name} and model.d_model={d_model} "
            f"is {advice} 1 / d_model. A rate that the file leaves out is that of model.recipe"
        )


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
    """Storage of the recurrent memory. bf16 takes half the bytes and rounds the hidden states. With
    `precision: bf16` the layers then also add up in bf16: the residual stream has this dtype."""


EVENT_STEPS = 1000
"""Number of the latest steps in which events of divergence are counted."""


class DivergenceConfig(Section):
    """Which steps count as divergence, and what follows.

    A loss or gradient norm that is NaN or infinite always counts. A spike counts if its threshold
    is set: a value above median + threshold * deviation of the last `window_steps` accepted steps.
    The deviation is 1.4826 * the median absolute deviation, which for normally distributed values
    is the standard deviation, and at least 1 % of the median. A step that can read less than half
    of the usual share of the memory is never a spike: after a discarded step, and where lanes or
    epochs begin. A change of data, lanes or tokens per step begins a new window. All ranks agree
    before the update.
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
    in the parent of the run directory. A relative PATH begins where `txl train` is started; later
    commands use the same file, wherever they are run. MLflow no longer has a file store."""
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
REFUSED_ZERO_VALUES = {
    "zero_quantized_weights": (True, "it rounds the weights to int8, a change of precision"),
    "zero_quantized_nontrainable_weights": (
        True, "checkpoints would have int8 codes of frozen weights"
    ),
    "zero_quantized_gradients": (True, "it rounds the gradients to int8, a change of precision"),
    "compute_grad_norm": (
        False, "without the norm, a step that has diverged would not be noticed"
    ),
}  # fmt: skip
"""Values of its keys that are refused, and why."""

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
        refuse(
            *(
                (key in zero, f"zero_optimization.{key} is not supported: {reason}; remove it")
                for key, reason in REFUSED_ZERO_KEYS.items()
            ),
            *(
                (
                    zero.get(key) == value,
                    f"zero_optimization.{key}={value} is not supported: {reason}; remove it",
                )
                for key, (value, reason) in REFUSED_ZERO_VALUES.items()
            ),
        )
        return extra

    @model_validator(mode="after")
    def _reject_ignored_offload(self) -> Self:
        refuse(
            (
                self.offload == "optimizer" and self.zero_stage == 0,
                "offload=optimizer at zero_stage=0 would be ignored: there is no partition to "
                "move. Use zero_stage 1, 2 or 3",
            ),
            (
                self.offload == "parameters" and self.zero_stage < 3,
                f"offload=parameters at zero_stage={self.zero_stage} would be ignored: "
                "DeepSpeed moves parameters at stage 3 only. Use zero_stage=3, or "
                "offload=optimizer",
            ),
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
