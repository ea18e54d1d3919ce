"""Initialisation: the original's distributions, from the seed alone."""

import pytest
import torch

from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

CONFIG = ModelConfig(
    vocab_size=301, n_layer=2, d_model=64, n_head=3, d_head=40, d_inner=96, d_embed=50,
    tie_weight=False, init_std=0.02, proj_init_std=0.01, cutoffs=(100, 200),
)  # fmt: skip


def expected_distribution(name: str) -> tuple[float, float]:
    """Mean and standard deviation, as the paper's training script sets them."""
    if "projections." in name:
        return 0.0, 0.01
    if name.endswith("norm.weight"):
        return 1.0, 0.02
    return 0.0, 0.0 if name.endswith((".bias", "cluster_bias")) else 0.02


def test_every_parameter_is_drawn_as_in_the_original() -> None:
    for name, parameter in TransformerXL(CONFIG).named_parameters():
        mean, std = expected_distribution(name)
        five_sigmas = 5 * std / parameter.numel() ** 0.5
        assert abs(parameter.mean() - mean) <= five_sigmas, name
        assert abs(parameter.std() - std) <= five_sigmas, name


def test_the_same_seed_gives_the_same_weights_after_any_other_random_numbers() -> None:
    torch.manual_seed(1)
    first = TransformerXL(CONFIG, seed=5).state_dict()
    torch.rand(7)
    second = TransformerXL(CONFIG, seed=5).state_dict()
    other = TransformerXL(CONFIG, seed=6).state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        assert torch.equal(weight, other[name]) == name.endswith((".bias", "cluster_bias")), name


def test_a_model_needs_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        TransformerXL(ModelConfig(vocab_size=0))
