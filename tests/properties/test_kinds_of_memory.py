"""Every kind of memory: causal, kept by lane, and with gradients where the kind says so.

The properties of whole runs (memory validity, one trajectory, elastic resume, exact evaluation)
have files of their own, which are parametrised over the same kinds.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.running_mean import KINDS
from tests.support.small_models import MODERN, SHORT_AND_LONG, VOCAB_SIZE, random_text, small_model
from txl_dist.model.choices import MEMORY_KINDS
from txl_dist.model.memory import SequenceState, memory_kind
from txl_dist.model.transformer_xl import TransformerXL

TGT_LENS = [4, 1, 3, 4, 2]
NUM_TOKENS = sum(TGT_LENS)
BEGINNINGS = (0, 6, 11)
"""Where the documents of lane 1 begin; the other lanes are one document."""

every_kind = pytest.mark.parametrize("kind", KINDS)
in_training_and_inference = pytest.mark.parametrize("start", ["empty_memory", "inference_state"])


def ages(num_lanes: int) -> Tensor:
    position_N = torch.arange(NUM_TOKENS)
    age_BN = position_N.repeat(num_lanes, 1)
    if num_lanes > 1:
        age_BN[1] = (
            torch.stack([position_N - begin for begin in BEGINNINGS])
            .masked_fill(position_N < torch.tensor(BEGINNINGS)[:, None], 999)
            .amin(0)
        )
    return age_BN


def read(
    model: TransformerXL,
    text_BN: Tensor,
    state: SequenceState,
    *,
    segments: range | None = None,
    age_BN: Tensor | None = None,
) -> tuple[Tensor, SequenceState]:
    """Nats of all tokens of these segments, and the state after them."""
    age_BN = ages(len(text_BN)) if age_BN is None else age_BN
    nats = []
    for number in segments or range(len(TGT_LENS)):
        start = sum(TGT_LENS[:number])
        here, following = slice(start, start + TGT_LENS[number]), slice(start + 1, None)
        target_BT = text_BN[:, following][:, : TGT_LENS[number]]
        nats_BT, state = model(text_BN[:, here], target_BT, age_BN[:, here], state)
        nats.append(nats_BT)
    return torch.cat(nats, dim=1), state


def changed(text_BN: Tensor, positions: int | slice) -> Tensor:
    """The text with other tokens at these positions."""
    changed_BN = text_BN.clone()
    changed_BN[:, positions] = (changed_BN[:, positions] + 1) % VOCAB_SIZE
    return changed_BN


BLOCKS: dict[str, dict[str, Any]] = {"": {}, "pre-norm": {"pre_lnorm": True}, **MODERN}
CASES = [
    *((kind, name, options) for kind in KINDS for name, options in BLOCKS.items()),
    # The layers of other memories have one length.
    *((kind, "short and long", SHORT_AND_LONG) for kind in ("recurrent", "recurrent+tokens")),
]
DISTANCES: dict[str, dict[str, Any]] = {
    "clamped": {"distance_encoding": "sinusoidal", "clamp_len": 3},
    "shaw": {"distance_encoding": "shaw", "clamp_len": 3},
    "rotary": {"distance_encoding": "rotary"},
    "alibi": {"distance_encoding": "alibi"},
    "clamped alibi": {"distance_encoding": "alibi", "clamp_len": 3},
}
MORE_CASES = [
    (kind, " ".join([name, distances, *same_length]), options | DISTANCES[distances] | same_length)
    for kind, name, options in CASES
    for distances in DISTANCES
    for same_length in ({}, {"same_length": True})
    if name in ("", "modern", "short and long")
    if not same_length or MEMORY_KINDS[kind].keys_are_tokens
]


@in_training_and_inference
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, id=f"{kind} {name}", marks=marks)
        for cases, marks in ((CASES, ()), (MORE_CASES, pytest.mark.slow))
        for kind, name, options in cases
    ],
)
@torch.no_grad()
def test_no_loss_depends_on_later_tokens(kind: str, start: str, options: dict[str, Any]) -> None:
    # Clusters of the softmax round differently if later tokens give them another number of rows.
    tolerance = 1e-14 if "cutoffs" in options else 0.0
    model, text_BN = small_model(memory=kind, **options), random_text(2, NUM_TOKENS + 1)
    nats_BN, _ = read(model, text_BN, getattr(model, start)(2))
    for position in range(1, NUM_TOKENS + 1):
        changed_BN = changed(text_BN, slice(position, None))
        other_BN, _ = read(model, changed_BN, getattr(model, start)(2))
        # The token at `position` is the target of the one before.
        before = other_BN[:, : position - 1], nats_BN[:, : position - 1]
        assert_close(*before, rtol=0, atol=tolerance)
        assert not torch.equal(other_BN[:, position - 1 :], nats_BN[:, position - 1 :])


@every_kind
@torch.no_grad()
def test_inference_has_the_numbers_of_the_memory(kind: str) -> None:
    model, text_BN = small_model(memory=kind, n_layer=3), random_text(3, NUM_TOKENS + 1)
    nats_BN, _ = read(model, text_BN, model.empty_memory(3))
    in_inference_BN, _ = read(model, text_BN, model.inference_state(3))
    assert_close(in_inference_BN, nats_BN)


@every_kind
@in_training_and_inference
@torch.no_grad()
def test_lanes_go_on_in_any_other_state_and_if_they_are_selected(kind: str, start: str) -> None:
    """As after a resume on other ranks: lanes in another order, loaded row by row."""
    model, text_BN = small_model(memory=kind), random_text(3, NUM_TOKENS + 1)
    nats_BN, _ = read(model, text_BN, getattr(model, start)(3))
    order = [2, 0, 1]
    # Three segments before, and a state that has read another text.
    _, state = read(model, text_BN, getattr(model, start)(3), segments=range(3))
    other_BN = random_text(3, NUM_TOKENS + 1, seed=9)
    _, loaded = read(model, other_BN, getattr(model, start)(3), segments=range(3))
    saved = [{name: x.clone() for name, x in state.row(lane).items()} for lane in range(3)]
    for row, lane in enumerate(order):
        loaded.load_row(row, saved[lane])
    rest_BN, _ = read(model, text_BN[order], loaded, segments=range(3, 5), age_BN=ages(3)[order])
    assert_close(rest_BN, nats_BN[order][:, sum(TGT_LENS[:3]) :], rtol=0, atol=1e-12)
    state = state.select([1], [0])
    rest_BN, _ = read(model, text_BN[1:2], state, segments=range(3, 5), age_BN=ages(3)[1:2])
    assert_close(rest_BN, nats_BN[1:2, sum(TGT_LENS[:3]) :], rtol=0, atol=1e-12)


def test_a_row_of_another_state_is_not_loaded() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="layer-0-keys"):
        model.inference_state(1).load_row(0, {"layer-0-keys": torch.zeros(3)})


@every_kind
@pytest.mark.parametrize("options", [{}, MODERN["modern"]], ids=["paper", "modern"])
def test_every_parameter_has_a_gradient_after_four_segments(
    kind: str, options: dict[str, Any]
) -> None:
    """Also those which only later segments train: four segments are one step."""
    model, text_BN = small_model(memory=kind, **options), random_text(2, 13)
    age_BN = torch.arange(12).expand(2, -1)
    state = model.empty_memory(2)
    nats_BN, _ = model(text_BN[:, :-1], text_BN[:, 1:], age_BN, state, None, 4)
    nats_BN.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, x in gradients.items() if x is None or not x.any()] == []


@every_kind
def test_gradients_stop_at_the_memory(kind: str) -> None:
    model, text_BN = small_model(memory=kind), random_text(2, NUM_TOKENS + 1)
    state, nats_BN = model.empty_memory(2), None
    for number in range(len(TGT_LENS)):
        nats_BN, state = read(model, text_BN, state, segments=range(number, number + 1))
        assert not any(x.requires_grad for x in state.tensors().values())
    nats_BN.sum().backward()


@every_kind
@pytest.mark.parametrize("options", [{}, {"pre_lnorm": True}, MODERN["modern"]], ids=str)
def test_segments_of_one_step_have_the_gradient_of_all_of_them(
    kind: str, options: dict[str, Any]
) -> None:
    """Against differences of the loss; without the gradient through the memory they disagree."""
    model, text_BN = small_model(memory=kind, **options), random_text(2, 13)
    age_BT = torch.stack([torch.arange(12), torch.tensor([3, 4, *range(10)])])
    state = model.empty_memory(2)

    def loss() -> Tensor:
        nats_BT, _ = model(text_BN[:, :-1], text_BN[:, 1:], age_BT, state, None, 3)
        # The last segment: what it depends on is in the others.
        return nats_BT[:, -4:].sum()

    loss().backward()
    slope = difference = 0.0
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        directions = [
            torch.randn(p.shape, generator=generator).double() for p in model.parameters()
        ]
        for p, d in zip(model.parameters(), directions, strict=True):
            slope += float((p.grad * d).sum())
        for sign in (1, -2):
            for p, d in zip(model.parameters(), directions, strict=True):
                p.add_(d, alpha=sign * 1e-6)
            difference += float(loss()) / (2e-6 if sign == 1 else -2e-6)
    assert slope == pytest.approx(difference, rel=1e-5)


@pytest.mark.parametrize("options", [{}, *MODERN.values()], ids=["", *MODERN])
def test_segments_of_one_step_are_one_text_if_the_memory_holds_them(
    options: dict[str, Any],
) -> None:
    """Losses, gradients and the next memory of a recurrent memory."""
    results = []
    for num_segments in (1, 2, 4):
        model, text_BN = small_model(mem_len=12, **options), random_text(2, 13)
        age_BT = torch.stack([torch.arange(12), torch.tensor([0, 1, *range(10)])])
        memory = model.empty_memory(2)
        nats_BT, memory = model(text_BN[:, :-1], text_BN[:, 1:], age_BT, memory, None, num_segments)
        nats_BT.sum().backward()
        tensors = memory.tensors().values()
        assert not any(tensor.requires_grad for tensor in tensors)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([nats_BT.detach(), *tensors, *gradients])
    for result in results[1:]:
        assert_close(result, results[0], rtol=1e-9, atol=1e-11)


@every_kind
def test_a_state_of_a_model_in_bf16_is_fp32_unless_asked_otherwise(kind: str) -> None:
    model = small_model(memory=kind).float()
    text_BN = random_text(2, NUM_TOKENS + 1)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = read(model, text_BN, model.empty_memory(2))
    assert {x.dtype for x in state.tensors().values()} == {torch.float32}


@every_kind
def test_the_state_of_another_number_of_lanes_is_refused(kind: str) -> None:
    model = small_model(memory=kind)
    with pytest.raises(ValueError, match=r"memory has .*model\.empty_memory\(3\)"):
        read(model, random_text(3, NUM_TOKENS + 1), model.empty_memory(2))


@every_kind
def test_the_receptive_field_is_whole_segments_or_has_no_limit(kind: str) -> None:
    """Tokens further back than `receptive_tokens` change nothing; those within change something."""
    model = small_model(memory=kind, mem_len=3)
    reach = memory_kind(model.config).receptive_tokens(2)
    assert reach is None or reach % 2 == 0
    text_BN = random_text(1, 21)

    @torch.no_grad()
    def last_nats(tokens_BN: Tensor) -> Tensor:
        state, nats_BT = model.empty_memory(1), None
        for start in range(0, 20, 2):
            here = slice(start, start + 2)
            age_BT = torch.arange(start, start + 2)[None]
            nats_BT, state = model(
                tokens_BN[:, here], tokens_BN[:, start + 1 : start + 3], age_BT, state
            )
        return nats_BT

    def is_seen(position: int) -> bool:
        return not torch.equal(last_nats(changed(text_BN, position)), last_nats(text_BN))

    first = 0 if reach is None else 18 - reach
    assert not any(is_seen(position) for position in range(first))
    assert any(is_seen(position) for position in (first, first + 1)), "its first segment"
