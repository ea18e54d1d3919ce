"""The model: segments with memory equal one segment; initial weights; recomputed activations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.small_models import MODERN, random_text, read_stream, small_model
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import LaneDropoutMasks
from txl_dist.model.transformer_xl import TransformerXL

TOKENS = {"memory": "recurrent+tokens", "memory_tokens": 2}
OPTIONS = [
    {},
    {"pre_lnorm": True},
    {"attention": "reference", "clamp_len": 3},
    {"d_embed": 3, "tie_projs": (True,)},
    {"untie_r": True, "cutoffs": (3, 6), "div_val": 2},
    {"distance_encoding": "shaw", "clamp_len": 4},
    {"distance_encoding": "rotary", "attention": "sdpa"},
    {"distance_encoding": "alibi"},
    *MODERN.values(),
    MODERN["modern"] | {"distance_encoding": "sinusoidal"},
    MODERN["modern"] | {"distance_encoding": "shaw", "clamp_len": 4},
    MODERN["modern"] | {"distance_encoding": "alibi"},
    {"distance_encoding": "alibi", "attention": "reference", "clamp_len": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=20, deadline=None)
@given(num_tokens=st.integers(2, 14), tgt_len=st.integers(1, 9), spare=st.integers(0, 5))
def test_segments_with_enough_memory_equal_one_segment(
    options: dict, num_tokens: int, tgt_len: int, spare: int
) -> None:
    model, text_BN = small_model(n_layer=3, **options), random_text(2, num_tokens)
    single_BN, all_inputs = read_stream(model, text_BN, tgt_len=num_tokens, mem_len=num_tokens)
    mem_len = (num_tokens - 2) // tgt_len * tgt_len + spare  # where the last segment starts
    in_segments_BN, memory = read_stream(model, text_BN, tgt_len=tgt_len, mem_len=mem_len)
    assert_close(in_segments_BN, single_BN)
    num_filled = min(mem_len, num_tokens - 1)
    for memory_BMD, all_BND in zip(memory.layers, all_inputs.layers, strict=True):
        assert_close(memory_BMD[:, mem_len - num_filled :], all_BND[:, num_tokens - num_filled :])


@pytest.mark.parametrize("mem_len", [0, 2, 4, 7], ids="M={}".format)
def test_one_layer_sees_its_segment_and_the_mem_len_tokens_before(mem_len: int) -> None:
    model, text_BN, tgt_len = small_model(n_layer=1), random_text(2, 18), 4
    nats_BN, _ = read_stream(model, text_BN, tgt_len=tgt_len, mem_len=mem_len)
    for start in range(0, 17, tgt_len):
        stop, oldest = min(start + tgt_len, 17), max(0, start - mem_len)
        window_BN, _ = read_stream(model, text_BN[:, oldest : stop + 1], tgt_len=18, mem_len=0)
        assert_close(nats_BN[:, start:stop], window_BN[:, start - oldest :])


@pytest.mark.parametrize("mem_len", [2, 4, 7], ids="M={}".format)
def test_same_length_does_not_depend_on_segment_boundaries(mem_len: int) -> None:
    model, text_BN = small_model(n_layer=1, same_length=True), random_text(2, 18)
    once_BN, _ = read_stream(model, text_BN, tgt_len=17, mem_len=mem_len)
    for tgt_len in (1, 3, 5):
        nats_BN, _ = read_stream(model, text_BN, tgt_len=tgt_len, mem_len=mem_len)
        assert_close(nats_BN, once_BN)


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


@pytest.mark.parametrize("options", [{}, {"pre_lnorm": True}, MODERN["modern"], TOKENS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_the_residual_stream_has_the_dtype_of_the_memory(
    options: dict, dtype: torch.dtype
) -> None:
    model = small_model(n_layer=3, dropout=0.1, **options).float()
    text_BN = random_text(2, 4)
    streams, gradients = [], []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, inputs, output: streams.extend((inputs[0], output)))
        layer.register_full_backward_hook(lambda _, inputs, outputs: gradients.extend(outputs))
    memory, age_BT = model.empty_memory(2, dtype=dtype), torch.full((2, 3), 5)
    for is_cast, expected in ((True, dtype), (False, torch.float32)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            nats_BT, after = model(text_BN[:, :-1], text_BN[:, 1:], age_BT, memory)
        nats_BT.sum().backward()
        assert {x.dtype for x in (*streams, *gradients)} == {expected}
        assert nats_BT.dtype == torch.float32
        assert [x.dtype for x in after.tensors().values()] == [
            x.dtype for x in memory.tensors().values()
        ]
        streams.clear(), gradients.clear()


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


MASKS = LaneDropoutMasks(seed=1, step=2, lanes=(0, 3))
RECOMPUTED = {
    "post-norm": {},
    "pre-norm": {"pre_lnorm": True},
    "reference": {"attention": "reference"},
    "own biases": {"untie_r": True},
    **MODERN,
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
@pytest.mark.parametrize("options", RECOMPUTED.values(), ids=RECOMPUTED)
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

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        read_stream(model, random_text(2, 33), tgt_len=32)
    return sum(storages.values()) - sum(p.nbytes for p in model.parameters())


def test_activations_inside_the_layers_are_not_stored() -> None:
    assert stored_bytes(recompute_layers=True) < stored_bytes(recompute_layers=False) / 4
