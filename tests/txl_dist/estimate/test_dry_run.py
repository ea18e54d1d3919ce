"""Dry runs: the parameters and activations of the real model."""

from typing import Any

import pytest
import torch

from tests.support.measured_steps import PeakBytes
from tests.txl_dist.estimate.models import run_config
from txl_dist.config.run_config import RunConfig
from txl_dist.estimate.dry_run import Device, dry_run, tail_rows
from txl_dist.model import vocabulary
from txl_dist.model.choices import RECIPES
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.engine.optimizers import create_optimizer

TWO_SEGMENTS = {"training": {"backprop_segments": 2}}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "pre-norm": {"model": {"pre_lnorm": True, "untie_r": True, "attention": "reference"}},
    "rotary": {"model": {"distance_encoding": "rotary"}},
    "alibi": {"model": {"distance_encoding": "alibi"}},
    "modern": {"model": RECIPES["modern"]},
    "shaw": {"model": {"distance_encoding": "shaw", "clamp_len": 63}},
    "recompute": {"training": {"activation_checkpointing": True}},
    "bf16 memory": {"training": {"memory_dtype": "bf16"}},
    "segments": {"training": {"backprop_segments": 4}},
    "compressive": {"model": {"memory": "compressive"}, **TWO_SEGMENTS},
    "recurrent+tokens": {"model": {"memory": "recurrent+tokens"}, **TWO_SEGMENTS},
}
MAX_ERROR = 0.02
DEVICES: tuple[Device, ...] = ("cpu", "cuda")


def real_peak(config: RunConfig) -> int:
    """Bytes that a forward and backward on this CPU add at most."""
    recompute, rows = config.training.activation_checkpointing, config.data.num_lanes
    token_BT = torch.zeros(rows, config.data.tgt_len, dtype=torch.int64)
    is_bf16, memory_dtype = config.precision == "bf16", config.training.memory_dtype
    with PeakBytes() as live:
        model = TransformerXL(config.model, recompute_layers=recompute)
        dtype = torch.bfloat16 if memory_dtype == "bf16" else torch.float32
        memory = model.empty_memory(rows, dtype=dtype)
        start = live.live_bytes
        live.reset_peak()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            segments = config.training.backprop_segments
            nats_BT, next_memory = model(token_BT, token_BT, token_BT.int(), memory, None, segments)
        nats_BT.sum().backward()
        del next_memory
    return live.peak_bytes - start


def dry_peak(config: RunConfig) -> int:
    peaks = dry_run(config, micro_batch_rows=config.data.num_lanes, device="cpu").activations
    return max(peaks.before_gradients, peaks.with_gradients)


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_activations_are_those_of_a_real_step(option: str) -> None:
    config = run_config(**OPTIONS[option])
    # In this order: a dry run must not leave tensors without data for the real one.
    assert dry_peak(config) == pytest.approx(real_peak(config), rel=MAX_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": {"cutoffs": (100, 300), "div_val": 2, "tie_projs": (False, True, True)}},
        {"model": {"tie_weight": False, "distance_encoding": "shaw", "clamp_len": 5}},
        {"optimizer": {"name": "muon", "averaging": "asgd"}},
    ],
)
def test_parameters_and_states_are_those_of_the_real_model(options: dict[str, Any]) -> None:
    config = run_config(**options)
    model = TransformerXL(config.model)
    groups = create_optimizer(model, config.optimizer).param_groups
    states = {id(p): len(group["states"]) for group in groups for p in group["params"]}
    dry = dry_run(config, micro_batch_rows=1, device="cpu")
    assert [(p.name, p.num_elements, p.num_states) for p in dry.parameters] == [
        (name, p.numel(), states[id(p)]) for name, p in model.named_parameters()
    ]


@pytest.mark.slow
def test_on_gpus_one_tensor_of_scores_is_stored_per_layer_and_bits_for_dropout() -> None:
    def stored(d_head: int, **options: Any) -> int:
        config = run_config(model={"d_head": d_head, **options}, tgt_len=128)
        return dry_run(config, micro_batch_rows=4, device="cuda").activations.after_forward

    model = run_config(tgt_len=128).model
    scores_bytes = model.n_layer * model.n_head * 4 * 128 * (128 + model.mem_len) * 4
    # The kernel stores the bias. Heads of 15 have no kernel: there the weights are stored instead.
    assert stored(16) == pytest.approx(stored(15), rel=0.1)
    # Dropout of weights stores a bit per score, in words of 16 bits: scores have 32.
    dropped = stored(16, dropatt=0.1)
    assert dropped - stored(16) == pytest.approx(scores_bytes / 32, rel=0.05)


@pytest.mark.slow
def test_on_gpus_large_logits_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model does it there (vocabulary.py); on CPUs all logits exist."""

    def peak(device: Device) -> int:
        config = run_config(model={"cutoffs": (400,)}, tgt_len=128)
        return dry_run(config, micro_batch_rows=4, device=device).activations.before_gradients

    whole = {device: peak(device) for device in DEVICES}
    monkeypatch.setattr(vocabulary, "MAX_LOGITS", 401 * 64)  # head: 512 rows in 8 chunks
    assert peak("cpu") == whole["cpu"]
    # Seven eighths of the logits; their gradient takes their place.
    assert whole["cuda"] - peak("cuda") > 0.75 * 512 * 401 * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("div_val", [1, 2])
def test_segments_of_a_step_have_clusters_each(div_val: int, device: Device) -> None:
    training = {"backprop_segments": 4}
    config = run_config(model={"cutoffs": (100, 300), "div_val": div_val}, training=training)
    whole = run_config(model={"cutoffs": (100, 300), "div_val": div_val})
    peaks = [
        dry_run(c, micro_batch_rows=2, device=device).activations.after_forward
        for c in (config, whole)
    ]
    assert peaks[0] > 0.9 * peaks[1]  # and each segment has keys of the memory


def test_rows_of_clusters_follow_zipf() -> None:
    config = ModelConfig(vocab_size=1000, cutoffs=(10, 100))
    weights = [1 / n for n in range(1, 1001)]
    shares = [sum(weights[10:100]) / sum(weights), sum(weights[100:]) / sum(weights)]
    assert tail_rows(config, num_tokens=10_000) == pytest.approx(
        [10_000 * share for share in shares], rel=0.01
    )
    assert tail_rows(ModelConfig(vocab_size=1000), num_tokens=10_000) == []
