"""The cross-entropy in chunks equals the plain one, in values and in all gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.testing import assert_close

from tests.support.small_models import random_text, small_model
from txl_dist.model import adaptive_softmax, host_copies
from txl_dist.model.chunked_cross_entropy import chunked_cross_entropy
from txl_dist.model.cluster_targets import IGNORED, ROW_MULTIPLE, copy_targets, select_targets

ROWS, WIDTH, COLUMNS = 7, 5, 11


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, WIDTH), (COLUMNS, WIDTH), (COLUMNS,))
    tensors = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    target_N = torch.randint(COLUMNS, (ROWS,), generator=generator)
    target_N[2] = IGNORED
    return [x.requires_grad_() for x in tensors], target_N, torch.randn(ROWS, dtype=dtype)


@pytest.mark.parametrize("num_rows", [1, 3, 7, 100])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_values_and_gradients_in_chunks_of_any_size(num_rows: int, scale: float) -> None:
    (x_NE, weight_VE, bias_V), target_N, weight_N = inputs(torch.float64)
    plain_N = cross_entropy(
        linear(x_NE * scale, weight_VE, bias_V), target_N, ignore_index=IGNORED, reduction="none"
    )
    expected = torch.autograd.grad(plain_N @ weight_N, (x_NE, weight_VE, bias_V))
    chunked_N = chunked_cross_entropy(
        x_NE * scale, weight_VE, bias_V, target_N, max_logits=num_rows * COLUMNS
    )
    assert chunked_N[2] == 0
    assert_close(chunked_N, plain_N)
    actual = torch.autograd.grad(chunked_N @ weight_N, (x_NE, weight_VE, bias_V))
    assert_close(actual, expected)


def test_under_autocast_sums_are_fp32() -> None:
    (x_NE, weight_VE, bias_V), target_N, weight_N = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        nats_N = chunked_cross_entropy(x_NE, weight_VE, bias_V, target_N, max_logits=22)
        logits_NV = linear(x_NE, weight_VE, bias_V)
    assert logits_NV.dtype == torch.bfloat16
    expected_N = cross_entropy(logits_NV.float(), target_N, ignore_index=IGNORED, reduction="none")
    assert nats_N.dtype == torch.float32
    assert_close(nats_N, expected_N, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(nats_N @ weight_N, (x_NE, weight_VE, bias_V))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_the_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    def recorded(*arguments: Tensor) -> Tensor:
        nonlocal largest
        result = linear(*arguments)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr("txl_dist.model.chunked_cross_entropy.linear", recorded)
    (x_NE, weight_VE, bias_V), target_N, weight_N = inputs(torch.float64)
    nats_N = chunked_cross_entropy(x_NE, weight_VE, bias_V, target_N, max_logits=2 * COLUMNS)
    (nats_N @ weight_N).backward()
    assert largest == 2 * COLUMNS


@pytest.mark.parametrize("targets", ["mixed", "shortlist only", "last cluster only", "ignored"])
def test_rows_found_on_the_host_are_those_of_the_device(targets: str) -> None:
    bounds, generator = ((0, 4), (4, 9), (9, 11)), torch.Generator().manual_seed(1)
    low, high = {"mixed": (-1, 11), "shortlist only": (0, 4), "last cluster only": (9, 11)}.get(
        targets, (-1, 0)
    )
    target_BT = torch.randint(low, high, (3, 29), generator=generator)
    selected = select_targets(target_BT.flatten(), bounds)
    copied = copy_targets(target_BT, bounds, torch.device("cpu"))
    assert torch.equal(copied.head_N, selected.head_N)
    for (row_R, target_R), (padded_row_R, padded_target_R) in zip(
        selected.tails, copied.tails, strict=True
    ):
        num_rows = len(row_R)
        assert len(padded_row_R) % ROW_MULTIPLE == 0
        assert torch.equal(padded_row_R[:num_rows], row_R)
        assert torch.equal(padded_target_R[:num_rows], target_R)
        assert (padded_row_R[num_rows:] == 0).all()
        assert (padded_target_R[num_rows:] == IGNORED).all()
    assert adaptive_softmax.IGNORED == IGNORED


@pytest.mark.parametrize("max_logits", [20, 2**27])
@pytest.mark.parametrize("options", [{}, {"div_val": 2, "tie_projs": (False, True, True)}])
def test_a_model_computes_the_same_as_on_a_gpu(
    options: dict[str, Any], max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding and softmax on GPUs have other operations: run them on the CPU."""
    model = small_model(cutoffs=(4, 9), **options)
    assert (4 + 2) % adaptive_softmax.HEAD_MULTIPLE, "the head is padded"
    text_BN = random_text(3, 9)
    text_BN[1, 5] = IGNORED

    def results() -> list[Tensor]:
        input_BT, age_BT = text_BN[:, :-1].clamp(min=0), torch.arange(8).expand(3, 8)
        memory = model.empty_memory(3)
        nats_BT, memory = model(input_BT, text_BN[:, 1:], age_BT, memory)
        gradients = torch.autograd.grad(nats_BT.square().sum(), [*model.parameters()])
        hidden_BTD, _ = model.hidden(input_BT, age_BT, memory)
        return [nats_BT, model.logits(hidden_BTD), *gradients]

    expected = results()
    monkeypatch.setattr(host_copies, "host_waits_for", lambda _: True)
    monkeypatch.setattr(host_copies, "to_device", lambda x, _: x)
    monkeypatch.setattr(adaptive_softmax, "MAX_LOGITS", max_logits)
    for actual, of_the_cpu in zip(results(), expected, strict=True):
        assert_close(actual, of_the_cpu, rtol=1e-12, atol=1e-12)
