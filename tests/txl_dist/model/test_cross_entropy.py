"""Cross-entropy of a linear layer in chunks, by triton's kernels.

The kernels run in triton's interpreter; the last test shows what the real compiler says.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.testing import assert_close

from txl_dist.model.vocabulary import IGNORED, linear_cross_entropy

ROWS, WIDTH, COLUMNS = 7, 5, 11


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton")


def inputs(
    dtype: torch.dtype, *, rows: int = ROWS, columns: int = COLUMNS, width: int = WIDTH
) -> tuple[list[Tensor], Tensor, Tensor]:
    """x, weight and bias; targets; the weights of the nats in a sum."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (columns, width), (columns,))
    tensors = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    target_N = torch.randint(columns, (rows,), generator=generator)
    target_N[2::5] = IGNORED
    weight_N = torch.randn(rows, generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in tensors], target_N, weight_N


def plain_cross_entropy(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    return cross_entropy(logits_NV, target_N, ignore_index=IGNORED, reduction="none")


@pytest.mark.parametrize("num_rows", [1, 3, 7, 100])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_values_and_gradients_in_chunks_of_any_size(num_rows: int, scale: float) -> None:
    tensors, target_N, weight_N = inputs(torch.float64)
    x_NE, *layer = tensors
    plain_N = plain_cross_entropy(linear(x_NE * scale, *layer), target_N)
    expected = torch.autograd.grad(plain_N @ weight_N, tensors)
    chunked_N = linear_cross_entropy(
        x_NE * scale, *layer, target_N, max_logits=num_rows * COLUMNS
    )  # fmt: skip
    assert chunked_N[2] == 0
    assert_close(chunked_N, plain_N)
    actual = torch.autograd.grad(chunked_N @ weight_N, tensors)
    assert_close(actual, expected)


SEVERAL_TILES: dict[str, Any] = {
    "rows": 3, "padding": 0, "num_hidden": 3, "scale": 1.0, "seed": 0,
}  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, 40),
    columns=st.sampled_from([1, 2, 8, 17, 64, 255, 256, 4096, 4097, 9000]),
    padding=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    num_hidden=st.integers(0, 3),
    scale=st.sampled_from([0.01, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
@example(columns=9000, dtype=torch.float64, **SEVERAL_TILES)
@example(columns=4097, dtype=torch.float32, **SEVERAL_TILES)
def test_kernels_equal_the_equation_in_float64(
    rows: int, columns: int, padding: int, dtype: torch.dtype, num_hidden: int, scale: float,
    seed: int,
) -> None:  # fmt: skip
    """Rows apart in memory; ignored targets; columns of probability 0; more than one tile."""
    generator = torch.Generator().manual_seed(seed)
    rows = min(rows, 3) if columns > 1000 else rows
    buffer = scale * torch.randn(rows, columns + padding, generator=generator, dtype=dtype)
    buffer[:, : min(num_hidden, columns - 1)] = -torch.inf
    logit_RV, between = buffer[:, :columns], buffer[:, columns:].clone()
    target_R = torch.randint(min(num_hidden, columns - 1), columns, (rows,), generator=generator)
    target_R[1::3] = IGNORED
    d_nats_R = torch.randn(rows, generator=generator, dtype=dtype)

    exact_RV = logit_RV.double().requires_grad_()
    exact_R = plain_cross_entropy(exact_RV, target_R)
    (expected_RV,) = torch.autograd.grad(exact_R, exact_RV, d_nats_R.double())

    total_R, nats_R = torch.empty(2, rows, dtype=dtype)
    operators = torch.ops.txl_dist
    operators.cross_entropy(logit_RV, target_R, total_R, nats_R)
    operators.cross_entropy_backward_(logit_RV, target_R, total_R, d_nats_R)
    tolerance: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
    if dtype == torch.float32:
        tolerance = {"rtol": 2e-5, "atol": 2e-5 * max(1.0, scale / 10)}
    assert_close(nats_R.double(), exact_R, **tolerance)
    assert_close(logit_RV.double(), expected_RV, **tolerance)
    assert (logit_RV[1::3] == 0).all()
    assert (nats_R[1::3] == 0).all()
    assert torch.equal(buffer[:, columns:], between)


@pytest.mark.parametrize("wrong", ["target", "logit"])
def test_a_target_beyond_the_vocabulary_and_a_logit_of_nan_are_noticed(wrong: str) -> None:
    (x_NE, *layer), target_N, _ = inputs(torch.float64)
    with torch.no_grad():
        if wrong == "target":
            target_N[0] = COLUMNS
        else:
            x_NE[0, 0] = torch.nan
    nats_N = linear_cross_entropy(x_NE, *layer, target_N, max_logits=1000)
    assert nats_N.isnan().tolist() == [True] + [False] * (ROWS - 1)


def test_without_rows_gradients_are_zero() -> None:
    tensors, target_N, _ = inputs(torch.float64, rows=0)
    nats_N = linear_cross_entropy(*tensors, target_N, max_logits=1000)
    assert nats_N.shape == (0,)
    for x, gradient in zip(tensors, torch.autograd.grad(nats_N.sum(), tensors), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("max_logits", [22, 1000])
def test_another_backward_repeats_the_gradients_bit_for_bit(max_logits: int) -> None:
    tensors, target_N, weight_N = inputs(torch.float32)
    nats_N = linear_cross_entropy(*tensors, target_N, max_logits=max_logits)
    first = torch.autograd.grad(nats_N @ weight_N, tensors, retain_graph=True)
    again = torch.autograd.grad(nats_N @ weight_N, tensors)
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_one_gradient_alone_is_that_of_all(wanted: int) -> None:
    tensors, target_N, weight_N = inputs(torch.float64)

    def gradients(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        nats_N = linear_cross_entropy(*tensors, target_N, max_logits=33)
        (nats_N @ weight_N).backward()
        return tuple(x.grad for x in tensors)

    expected = gradients(*tensors)[wanted]
    alone = [x.detach().requires_grad_(k == wanted) for k, x in enumerate(tensors)]
    actual = gradients(*alone)
    assert torch.equal(actual[wanted], expected)
    assert sum(x is not None for x in actual) == 1


@pytest.mark.parametrize("max_logits", [22, 1000])
def test_under_autocast_sums_are_fp32(max_logits: int) -> None:
    tensors, target_N, weight_N = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        nats_N = linear_cross_entropy(*tensors, target_N, max_logits=max_logits)
        logits_NV = linear(*tensors)
    assert logits_NV.dtype == torch.bfloat16
    expected_N = plain_cross_entropy(logits_NV.float(), target_N)
    assert nats_N.dtype == torch.float32
    assert_close(nats_N, expected_N, rtol=1e-6, atol=1e-6)
    expected = torch.autograd.grad(expected_N @ weight_N, tensors)
    gradients = torch.autograd.grad(nats_N @ weight_N, tensors)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert_close(gradients, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("width", [5, 8, 410])
def test_products_in_bf16_load_16_bytes_at_a_time(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are padded with zeros, which change no value and no gradient."""
    row_bytes = set()

    def recorded(*arguments: Tensor) -> Tensor:
        row_bytes.update(x.stride(0) * x.element_size() for x in arguments[:2])
        return linear(*arguments)

    monkeypatch.setattr("txl_dist.model.vocabulary.linear", recorded)
    tensors, target_N, weight_N = inputs(torch.float32, width=width)
    results = []
    for vector_bytes in (2, 16):
        row_bytes.clear()
        monkeypatch.setattr("txl_dist.model.vocabulary.VECTOR_BYTES", vector_bytes)
        with torch.autocast("cpu", torch.bfloat16):
            nats_N = linear_cross_entropy(*tensors, target_N, max_logits=33)
        gradients = torch.autograd.grad(nats_N @ weight_N, tensors)
        assert [x.shape for x in gradients] == [x.shape for x in tensors]
        assert all(x.is_contiguous() for x in gradients)
        results.append([nats_N.detach(), *gradients])
    assert {number % 16 for number in row_bytes} == {0}
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("num_rows", [2, 3, 4])
def test_the_whole_logits_never_exist(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those of the last chunk computed twice."""
    sizes = []

    def recorded(*arguments: Tensor) -> Tensor:
        result = linear(*arguments)
        sizes.append(len(result))
        return result

    monkeypatch.setattr("txl_dist.model.vocabulary.linear", recorded)
    tensors, target_N, weight_N = inputs(torch.float64)
    nats_N = linear_cross_entropy(*tensors, target_N, max_logits=num_rows * COLUMNS)
    (nats_N @ weight_N).backward()
    assert (
        sizes
        == {
            2: [2, 2, 2, 1, 2, 2, 2],
            3: [3, 3, 1, 3, 3],
            4: [4, 3, 4],
        }[num_rows]
    )


COMPILER = """
import json, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from txl_dist.model import kernels

name, capability, logits = json.loads(sys.argv[1])
kernel, sums = getattr(kernels, name), "fp64" if logits == "fp64" else "fp32"
constants = {
    "MULTIPLE": 8, "BLOCK_R": 1, "BLOCK_V": 4096,
    "ACC": tl.float64 if sums == "fp64" else tl.float32,
}
types = [f"*{logits}", "*i64", f"*{sums}", f"*{sums}", "i32", "i32", "i32"]
signature = dict(zip(kernel.arg_names, types + ["constexpr"] * len(constants), strict=True))
aligned = {(index,): [["tt.divisibility", 16]] for index in range(4)}
print(triton.compile(
    ASTSource(kernel, signature, constants, aligned),
    target=GPUTarget("cuda", capability, 32),
    options={"num_warps": 8},
).asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("logits", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["nats_kernel", "gradient_kernel"])
def test_the_kernels_compile_and_load_16_bytes_at_a_time(
    name: str, capability: int, logits: str
) -> None:
    arguments = json.dumps([name, capability, logits])
    ptx = subprocess.run(
        [sys.executable, "-c", COMPILER, arguments], check=True, capture_output=True, text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    ).stdout  # fmt: skip
    vector = "v2.b64" if logits == "fp64" else "v4.b32"
    assert f"ld.global.{vector}" in ptx
    assert (f"st.global.{vector}" in ptx) == (name == "gradient_kernel")
