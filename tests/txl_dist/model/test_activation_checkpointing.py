"""Activation checkpointing: the same numbers, with only the layers' inputs stored."""

import pytest
import torch
from torch import Tensor

from tests.support.small_models import random_text, read_stream, small_model
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.lane_dropout import LaneDropoutMasks

MASKS = LaneDropoutMasks(seed=1, step=2, lanes=(0, 3))
OPTIONS = {
    "post-norm": {},
    "pre-norm": {"pre_lnorm": True},
    "reference": {"attention": "reference"},
    "own biases": {"untie_r": True},
}


def gradients(model: TransformerXL, masks: LaneDropoutMasks | None = None) -> list[Tensor]:
    """Of the second segment, with the memory of the first and with dropout."""
    text_BN = random_text(2, 9)
    torch.manual_seed(3)  # of the masks where none are given
    _, memory = read_stream(model, text_BN[:, :5], tgt_len=4)
    age_BT = torch.arange(4, 8).expand(2, 4)
    nats_BT, _ = model(text_BN[:, 4:8], text_BN[:, 5:], age_BT, memory, masks)
    return [nats_BT, *torch.autograd.grad(nats_BT.sum(), list(model.parameters()))]


@pytest.mark.parametrize("masks", [MASKS, None], ids=["masks by lane", "random masks"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_losses_and_gradients_are_equal_bit_for_bit(
    options: dict[str, object], masks: LaneDropoutMasks | None
) -> None:
    model = small_model(dropout=0.3, dropatt=0.3, **options)
    expected = gradients(model, masks)
    model.recompute_layers = True
    assert all(map(torch.equal, gradients(model, masks), expected))


def stored_bytes(*, recompute_layers: bool) -> int:
    """Bytes that autograd stores for the backward of one segment."""
    config = ModelConfig(
        vocab_size=11, n_layer=5, d_model=16, n_head=2, d_head=8, d_inner=64, mem_len=8
    )
    model = TransformerXL(config, recompute_layers=recompute_layers)
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    text_BN = random_text(2, 33)
    age_BT = torch.arange(32).expand(2, 32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(text_BN[:, :-1], text_BN[:, 1:], age_BT, model.empty_memory(2))
    return sum(storages.values()) - sum(p.nbytes for p in model.parameters())


def test_activations_inside_the_layers_are_not_stored() -> None:
    assert stored_bytes(recompute_layers=True) < stored_bytes(recompute_layers=False) / 4
