"""The section `deepspeed`: the ZeRO stage, and which keys of DeepSpeed's JSON may be set.

DeepSpeed ignores top-level keys that it does not know, so a typo would be silent. The lists are
those of DeepSpeed 0.19.8.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from txl_dist.config.data_config import Section

GPU_BUCKET_SIZE = 25_000_000
"""Elements of a reduction on GPUs (100 MB). DeepSpeed's default of 500 million is more than most of
our models have, so nothing would be reduced before the end of backward, and takes 2 GB."""
DECIDED_BY = {
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
    "gradient_clipping": "optimizer.gradient_clipping",
    "train_batch_size": "data.num_lanes",
    "train_micro_batch_size_per_gpu": "training.micro_batch_lanes",
    "gradient_accumulation_steps": "training.micro_batch_lanes",
    "managed_gradient_accumulation": "training.micro_batch_lanes",
    "gradient_allreduce_op": "data.num_lanes",
    "fp16": "precision",
    "bf16": "precision",
    "bfloat16": "precision",  # Old name of bf16, which DeepSpeed still reads.
    "data_types": "precision",
    "torch_autocast": "precision",
    "checkpoint": "training",
    "zero_force_ds_cpu_optimizer": "deepspeed.offload",
    "activation_checkpointing": "training.activation_checkpointing",
}
"""Keys that are refused, because a setting of RunConfig decides their value."""

UNUSABLE_ZERO_KEYS = {
    "round_robin_gradients": "DeepSpeed 0.19.8 then mixes up which part of the optimizer state "
    "belongs to which parameter, so checkpoints would be wrong",
    "zenflow": "it has another optimizer state, which checkpoints do not contain",
}
"""Keys of `zero_optimization` that are refused, and why."""

READ_BY_DEEPSPEED = frozenset({
    "aio", "amp", "autotuning", "comet", "comms_logger",
    "communication_data_type", "compile", "compression_training", "csv_monitor",
    "curriculum_learning", "data_efficiency", "dataloader_drop_last", "datastates_ckpt",
    "disable_allgather", "disable_python_gc", "dump_state", "eigenvalue", "elasticity",
    "expert_parallel", "flops_profiler", "gradient_predivide_factor", "graph_harvesting",
    "hybrid_engine", "log_level", "memory_breakdown", "nebula", "pipeline",
    "prescale_gradients", "progressive_layer_drop", "quantize_training",
    "seq_parallel_communication_data_type", "sparse_attention", "sparse_gradients",
    "steps_per_print", "tensor_parallel", "tensorboard", "timers",
    "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb",
    "weight_quantization", "zero_allow_untested_optimizer", "zero_optimization",
})  # fmt: skip
"""Every other top-level key that DeepSpeed reads, including removed ones that it refuses itself."""


class DeepSpeedConfig(Section):
    """The ZeRO stage, and DeepSpeed options that no setting of ours decides."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ranks shard: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What is kept on the host: optimizer state (stages 1-3), or also parameters (stage 3)."""
    extra: dict[str, Any] = Field(default={})
    """Merged into DeepSpeed's JSON. `DECIDED_BY` lists keys that are refused."""

    @model_validator(mode="after")
    def _reject_owned_keys(self) -> Self:
        problems = [
            *refused_keys(self.extra),
            *refused_offload(self.offload, zero_stage=self.zero_stage),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def reduction(self, *, stage: int, num_ranks: int, on_gpu: bool) -> dict[str, Any]:
        """`extra.zero_optimization`, with our defaults for GPUs (docs/decisions/0039)."""
        defaults: dict[str, Any] = {}
        if on_gpu and stage > 0:
            # Not at stage 2: DeepSpeed 0.19.8 frees a gradient that is larger than the bucket while
            # its other stream still reduces it (average_tensor in stage_1_and_2.py).
            overlaps = num_ranks > 1 and stage != 2
            defaults = {"overlap_comm": overlaps, "reduce_bucket_size": GPU_BUCKET_SIZE}
        return {**defaults, **self.extra.get("zero_optimization", {})}


def refused_keys(extra: Mapping[str, Any]) -> Iterator[str]:
    """A message for every key of `deepspeed.extra` that is owned elsewhere or unknown."""
    for key in extra:
        if key in DECIDED_BY:
            yield (
                f"extra.{key} would contradict {DECIDED_BY[key]}, which decides it; remove it "
                f"and set {DECIDED_BY[key]}"
            )
        elif key not in READ_BY_DEEPSPEED:
            nearest = difflib.get_close_matches(key, READ_BY_DEEPSPEED, n=1)
            hint = f"did you mean extra.{nearest[0]}?" if nearest else "remove it"
            yield f"extra.{key} is not a key of DeepSpeed, which would ignore it; {hint}"
    zero = extra.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f"extra.zero_optimization={zero!r} must be a mapping"
    else:
        for key in sorted(UNUSABLE_ZERO_KEYS.keys() & zero.keys()):
            if zero[key]:
                yield (
                    f"extra.zero_optimization.{key} is not supported: {UNUSABLE_ZERO_KEYS[key]}; "
                    "remove it"
                )
        if "stage" in zero:
            yield "extra.zero_optimization.stage would contradict deepspeed.zero_stage; remove it"
        for key in sorted(key for key in zero if key.startswith("offload_")):
            yield (
                f"extra.zero_optimization.{key} would contradict deepspeed.offload; remove it and "
                "set deepspeed.offload to none, optimizer or parameters"
            )


def refused_offload(offload: str, *, zero_stage: int) -> Iterator[str]:
    """A message if DeepSpeed would ignore `deepspeed.offload` at this stage."""
    if offload == "optimizer" and zero_stage == 0:
        yield (
            "offload=optimizer at zero_stage=0 would be ignored: there is no partition to move. "
            "Use zero_stage 1, 2 or 3"
        )
    if offload == "parameters" and zero_stage < 3:
        yield (
            f"offload=parameters at zero_stage={zero_stage} would be ignored: DeepSpeed moves "
            "parameters at stage 3 only. Use zero_stage=3, or offload=optimizer"
        )
