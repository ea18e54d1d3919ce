"""DeepSpeed's JSON: all of ours in it, and nothing that contradicts us."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support.commands import ENVIRONMENT
from tests.support.training_runs import NO_EVALUATION, TinyRuns, refusal, train
from txl_dist.config.data_config import DataConfig
from txl_dist.config.run_config import Precision, RunConfig
from txl_dist.config.training_config import DeepSpeedConfig, OptimizerConfig, TrainingConfig
from txl_dist.training.engine.deepspeed_setup import deepspeed_settings

SHAPE = {"num_ranks": 3, "num_micro_batches": 5, "micro_batch_rows": 7}
ON_CPU: dict[str, Any] = {**SHAPE, "on_gpu": False}
ON_GPU: dict[str, Any] = {**SHAPE, "on_gpu": True}


def config_with(*, gradient_clipping: float = 0.25, **deepspeed: Any) -> RunConfig:
    return RunConfig(
        directory="runs/none",
        data=DataConfig(path="data/none"),
        training=TrainingConfig(num_steps=10),
        optimizer=OptimizerConfig(gradient_clipping=gradient_clipping),
        deepspeed=DeepSpeedConfig(**deepspeed),
    )


BUCKETS = {"overlap_comm": False, "reduce_bucket_size": 25_000_000}
BUCKET_11 = {"extra": {"zero_optimization": {"reduce_bucket_size": 11}}}


@pytest.mark.parametrize(
    ("stage", "num_ranks", "on_gpu", "options", "expected"),
    [
        # On GPUs gradients are reduced in small buckets, with an overlap where that is faster.
        (0, 3, True, {}, {"stage": 0}),
        (1, 3, True, {}, BUCKETS | {"stage": 1, "overlap_comm": True}),
        (2, 3, True, {}, BUCKETS | {"stage": 2}),
        (3, 3, True, {}, BUCKETS | {"stage": 3, "overlap_comm": True}),
        (1, 3, True, {"extra": {"zero_optimization": {"overlap_comm": "ours"}}},
         BUCKETS | {"stage": 1, "overlap_comm": "ours"}),
        # One GPU shards nothing, and has nothing to overlap, unless a setting needs the stage.
        (1, 1, True, {}, {"stage": 0}),
        (2, 1, True, {}, {"stage": 0}),
        (3, 1, True, {}, BUCKETS | {"stage": 3}),
        (1, 1, True, {"extra": {"wall_clock_breakdown": True}}, BUCKETS | {"stage": 1}),
        (2, 1, True, BUCKET_11, BUCKETS | {"stage": 2, "reduce_bucket_size": 11}),
        # On CPUs the section has what is given.
        (0, 1, False, {}, {"stage": 0}),
        (1, 1, False, {}, {"stage": 1}),
        *((stage, 3, False, BUCKET_11, {"stage": stage, "reduce_bucket_size": 11})
          for stage in range(4)),
    ],
)  # fmt: skip
def test_the_stage_and_the_reduction_of_gradients(
    stage: int, num_ranks: int, on_gpu: bool, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = config_with(zero_stage=stage, **options)
    shape = SHAPE | {"num_ranks": num_ranks, "on_gpu": on_gpu}
    settings = deepspeed_settings(config, **shape)
    assert settings["zero_optimization"] == expected
    assert config.deepspeed.computed_stage(num_ranks=num_ranks, on_gpu=on_gpu) == expected["stage"]
    for key, value in options.get("extra", {}).items():
        assert key == "zero_optimization" or settings[key] == value


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    ("offload", "stage", "sections"),
    [
        ("none", 3, set()),
        ("optimizer", 1, {"offload_optimizer"}),
        ("optimizer", 3, {"offload_optimizer"}),
        ("parameters", 3, {"offload_optimizer", "offload_param"}),
    ],
)
def test_offload_keeps_sections_on_the_host(
    offload: str, stage: int, sections: set[str], num_ranks: int
) -> None:
    config, shape = config_with(zero_stage=stage, offload=offload), {"num_ranks": num_ranks}
    for on_gpu in (ON_CPU, ON_GPU):
        zero = deepspeed_settings(config, **on_gpu | shape)["zero_optimization"]
        assert zero["stage"] == stage
        assert {key for key in zero if key.startswith("offload_")} == sections
        assert all(zero[section]["device"] == "cpu" for section in sections)


def test_batch_sizes_and_clipping_are_those_of_the_plan() -> None:
    """Always written: DeepSpeed clips at 1 otherwise. One rank at stage 0 clips itself."""
    for stage, num_ranks, clipping in ((0, 1, 0.0), (0, 2, 0.25), (1, 1, 0.25)):
        settings = deepspeed_settings(
            config_with(zero_stage=stage), **ON_CPU | {"num_ranks": num_ranks}
        )
        assert settings["gradient_clipping"] == clipping
        assert settings["train_micro_batch_size_per_gpu"] == 7
        assert settings["gradient_accumulation_steps"] == 5
        assert settings["train_batch_size"] == num_ranks * 5 * 7


@pytest.mark.parametrize(("precision", "enabled"), [("fp32", False), ("bf16", True)])
def test_bf16_is_autocast_and_never_the_parameters(precision: Precision, enabled: bool) -> None:
    config = config_with().model_copy(update={"precision": precision})
    settings = deepspeed_settings(config, **ON_CPU)
    assert settings["torch_autocast"] == {
        "enabled": enabled,
        "dtype": "bfloat16",
        "lower_precision_safe_modules": [],
    }
    assert not {"bf16", "fp16", "data_types"} & settings.keys()


IGNORED = "offload={} at zero_stage={} would be ignored"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        *(
            ({"extra": {key: {}}}, f"extra.{key}")
            for key in (
                *("optimizer", "scheduler", "gradient_clipping", "train_batch_size", "fp16"),
                *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "data_types"),
                *("managed_gradient_accumulation", "gradient_allreduce_op", "torch_autocast"),
                *("bfloat16", "checkpoint", "zero_force_ds_cpu_optimizer", "bf16"),
                *("gradient_predivide_factor", "zero_optimisation"),
            )
        ),
        ({"extra": {"xyz": 1}}, "Input should be 'zero_optimization', 'communication_data_type'"),
        ({"extra": {"zero_optimization": {"stage": 1}}}, "deepspeed.zero_stage decides it"),
        ({"extra": {"zero_optimization": {"offload_optimizer": {}}}}, "offload decides it"),
        # With these, checkpoints would be wrong.
        ({"extra": {"zero_optimization": {"round_robin_gradients": True}}}, "is not supported"),
        ({"extra": {"zero_optimization": {"zenflow": True}}}, "is not supported"),
        ({"extra": {"zero_optimization": {"zero_quantized_weights": True}}}, "int8"),
        ({"extra": {"zero_optimization": {"compute_grad_norm": False}}}, "=False is not supported"),
        ({"offload": "optimizer", "zero_stage": 0}, IGNORED.format("optimizer", 0)),
        ({"offload": "parameters", "zero_stage": 2}, IGNORED.format("parameters", 2)),
    ],
)
def test_what_contradicts_or_would_be_ignored_is_refused_before_a_rank_starts(
    options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        DeepSpeedConfig(**{"zero_stage": 1, **options})


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            {"zero_optimization": {"reduce_bucket_size": "many", "no_such": 1}},
            ("(zero_optimization)", "reduce_bucket_size", "'many'", "no_such"),
        ),
        ({"communication_data_type": "fp99"}, ("(communication_data_type)", "Got: fp99")),
    ],
)
def test_what_deepspeed_itself_refuses_is_a_config_error_with_its_reason(
    tiny: TinyRuns, extra: dict[str, Any], expected: Any
) -> None:
    spec = tiny.spec(tiny.path, NO_EVALUATION, f"deepspeed.extra={json.dumps(extra)}")
    assert tiny.ranks(2).run(train, spec) == [2, 2]
    message = refusal(tiny.path)
    for part in expected:
        assert part in message


@pytest.mark.parametrize("stage", [1, 2])
def test_a_wrong_mapping_of_deepspeed_is_noticed_before_training(
    tiny: TinyRuns, stage: int
) -> None:
    """Any other option that has the effect of `round_robin_gradients`."""
    spec = tiny.spec(tiny.path, NO_EVALUATION)
    extra = {"zero_optimization": {"round_robin_gradients": True}}
    deepspeed = spec.config.deepspeed.model_copy(update={"extra": extra, "zero_stage": stage})
    config = spec.config.model_copy(update={"deepspeed": deepspeed})
    assert tiny.ranks(2).run(train, spec.model_copy(update={"config": config})) == [2, 2]
    assert "DeepSpeed maps other numbers than those of" in refusal(tiny.path)


CODE = """
import sys
from txl_dist.training.engine.deepspeed_setup import import_deepspeed

import_deepspeed()
print([name for name in ("mlflow", "torch._inductor.compile_fx") if name in sys.modules])
"""


@pytest.mark.slow
def test_it_imports_neither_mlflow_nor_the_compiler() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE], check=True, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert ended.stdout.splitlines()[-1] == "[]"
