"""`attention: triton`: the kernels, in triton's interpreter, equal the equation in float64.

The interpreter takes about 30 ms per program, so sizes are tiny, and tiles are made small to have
several of them. The last tests show what the real compiler says.
"""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from tests.support.attention_inputs import TERMS, Inputs
from tests.support.small_models import random_text, read_stream, small_model
from tests.support.token_sources import TextSource
from txl_dist.evaluation.scoring import Scorer
from txl_dist.model.attention import pack_heads
from txl_dist.model.attention import triton as triton_module
from txl_dist.model.attention.torch_attention import reference
from txl_dist.model.attention.triton import triton
from txl_dist.model.dropout import LaneDropoutMasks
from txl_dist.model.encodings import DistanceTerms
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.model.visibility import Visibility


@dataclass(frozen=True)
class Case:
    """Arguments of `Inputs.of`, and the tiles of the kernels: rows by columns (`Tiles`)."""

    sizes: tuple[int, int, int, int, int]
    """B, T, M, H, K."""
    terms: str
    tiles: tuple[int, int]
    dropout: bool = False
    same_length: bool = False
    ages: tuple[tuple[int, ...], ...] | None = None

    def inputs(self) -> Inputs:
        return Inputs.of(
            [*self.sizes],
            self.terms,
            dropout=self.dropout,
            same_length=self.same_length,
            age_BT=None if self.ages is None else torch.tensor(self.ages),
        )


@pytest.fixture
def use_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Called with the size of tiles that all kernels shall have."""
    from txl_dist.model.attention import triton_launch

    def use(tiles: tuple[int, int]) -> None:
        fixed = triton_launch.Tiles(*tiles, num_warps=1, num_stages=1)
        monkeypatch.setattr(triton_launch, "tiles_of", lambda *call, **options: fixed)

    return use


CASES = {
    # Different in every size, one tile.
    "paper": Case((2, 3, 5, 3, 4), "paper", (16, 16)),
    # Tiles that divide nothing; a document starts in the middle of the segment.
    "several tiles, documents": Case(
        (1, 11, 6, 1, 5), "all", (8, 4), ages=((9, 10, 0, 1, 2, 3, 4, 5, 6, 7, 8),)
    ),
    # Tiles of dropout bits have whole words.
    "several tiles, dropout": Case((2, 19, 18, 3, 5), "all", (16, 16), dropout=True),
    # Tiles without a visible key, before and after the visible ones.
    "same_length": Case((1, 5, 9, 1, 3), "paper", (4, 4), same_length=True, ages=(range(20, 25),)),
    "one query, full memory": Case((2, 1, 11, 1, 41), "shaw", (8, 4), ages=((50,), (2,))),
    "no memory, constant scores": Case((1, 6, 0, 2, 16), "alibi", (16, 32), dropout=True),
}


def check(case: Case) -> None:
    """Output and all gradients."""
    inputs = case.inputs()
    B, T, _, H, K = case.sizes
    weight = torch.randn(B, T, H, K, dtype=torch.float64)
    mixed, gradients = inputs.with_keep_bits().output_and_gradients(triton, weight)
    expected, expected_gradients = inputs.output_and_gradients(reference, weight)
    assert_close(mixed, expected)
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if CASES[name].dropout else []) for name in CASES],
)
def test_the_kernels_equal_the_equation_and_its_gradients(name: str, use_tiles: Any) -> None:
    use_tiles(CASES[name].tiles)
    check(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("d_head", [5, 16, 41])
@pytest.mark.parametrize("num_queries_and_memory", [(1, 0), (1, 7), (6, 0), (6, 13), (9, 2)])
@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("terms", TERMS)
def test_the_kernels_equal_the_equation_for_all_terms_and_sizes(
    terms: str,
    same_length: bool,
    num_queries_and_memory: tuple[int, int],
    d_head: int,
    use_tiles: Any,
) -> None:
    num_queries, mem_len = num_queries_and_memory
    if same_length and mem_len == 0:
        pytest.skip("refused by ModelConfig")
    for dropout, tiles in [(False, (8, 4)), (False, (16, 8)), (True, (16, 32)), (True, (64, 64))]:
        use_tiles(tiles)
        sizes = (2, num_queries, mem_len, 1, d_head)
        check(Case(sizes, terms, tiles, dropout=dropout, same_length=same_length))


def test_rows_of_padding_have_no_weight_in_tiles_without_a_mask(use_tiles: Any) -> None:
    """Scores whose exponential is infinite in fp32, of one query: its class has seven more rows."""
    use_tiles((8, 4))
    inputs = Inputs.of([1, 1, 15, 1, 16], "paper", age_BT=torch.tensor([[15]]))

    def leaf(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (scale * x.detach()).float().requires_grad_()

    terms = {name: leaf(getattr(inputs.terms, name)) for name in TERMS["paper"]}
    inputs = replace(
        inputs,
        q_HBTK=leaf(inputs.q_HBTK, 60.0),
        k_HBSK=leaf(inputs.k_HBSK),
        v_HBSK=leaf(inputs.v_HBSK),
        terms=DistanceTerms(**terms),
    )
    d_mixed = torch.ones(1, 1, 1, 16)
    mixed, gradients = inputs.output_and_gradients(triton, d_mixed)
    expected, expected_gradients = inputs.output_and_gradients(reference, d_mixed)
    assert_close(mixed, expected)
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-3)


def test_every_element_of_every_result_is_stored_exactly_once(
    use_tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So results repeat bit for bit, and places without a visible key get a gradient of zero."""
    from triton.runtime.interpreter import interpreter_builder

    ages = ((3, 4, 0, 1, 2, 3, 4, 5, 0, 1, 2), (*range(11),))
    case = Case((2, 11, 6, 1, 3), "paper", (8, 4), ages=ages)
    use_tiles(case.tiles)
    inputs, stores = case.inputs(), Counter[int]()
    create_masked_store = type(interpreter_builder).create_masked_store

    def count(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        stores.update(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].tolist())
        return create_masked_store(builder, pointers, value, mask, *rest)

    monkeypatch.setattr(type(interpreter_builder), "create_masked_store", count)
    operators = torch.ops.txl_dist
    B, T, M, H, _ = case.sizes
    arguments = (
        *(x.detach() for x in (inputs.q_HBTK, inputs.k_HBSK, inputs.v_HBSK)),
        torch.randn(H, 8, B, 2, 32, dtype=torch.float64),
        inputs.visibility.reach_BT.int(),
        None,
        0.0,
    )
    outputs = operators.relative_attention(*arguments)
    d_mixed = torch.randn_like(outputs[0])
    gradients = operators.relative_attention_backward(d_mixed, *arguments, *outputs, True)
    for result in (*outputs, *gradients):
        assert {
            stores[result.data_ptr() + result.element_size() * index]
            for index in range(result.numel())
        } == {1}
    d_distance, reach_BT = gradients[-1], inputs.visibility.reach_BT
    visible = torch.zeros(d_distance.shape, dtype=torch.bool)
    for lane, t, s in product(range(B), range(T), range(M + T)):
        if 0 <= M + t - s <= reach_BT[lane, t]:
            visible[:, t % 8, lane, t // 8, s + 8 * (1 - t // 8)] = True
    assert (d_distance[~visible] == 0).all()
    assert (d_distance[visible] != 0).double().mean() > 0.9  # 0 for a query with a single key


@pytest.mark.parametrize("mem_len", [0, 5, 8])
@pytest.mark.parametrize("tiles", [(8, 4), (16, 16)])
def test_projections_give_the_numbers_of_packed_heads(
    mem_len: int, tiles: tuple[int, int], use_tiles: Any
) -> None:
    """Tiles that lie in memory or segment, and tiles that lie in both."""
    use_tiles(tiles)
    B, T, H, K = 2, 6, 3, 16
    inputs = Inputs.of([B, T, mem_len, H, K], "paper")
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, num_tokens, 2 * H * K) for num_tokens in (mem_len, T)]
    projected = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    d_mixed = torch.randn(B, T, H, K, generator=generator, dtype=torch.float64)
    results = []
    for packs in (True, False):
        x_HBTK, *parts = (x.clone().requires_grad_() for x in (inputs.q_HBTK.detach(), *projected))
        keys_and_values = pack_heads(*parts, (H, K)) if packs else parts
        mixed = triton(x_HBTK, *keys_and_values, inputs.terms, inputs.visibility, None)
        gradients = torch.autograd.grad(mixed, [x_HBTK, *parts], d_mixed)
        results.append([mixed.detach(), *gradients])
    assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"distance_encoding": "alibi"}, {"dropatt": 0.3}], ids=str)
def test_a_layer_without_norm_or_rotation_of_keys_reads_projections(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the losses are those of `reference`."""
    dimensions = []

    def counted(*arguments: Any) -> torch.Tensor:
        dimensions.append(arguments[1].dim())
        return triton(*arguments)

    monkeypatch.setattr(triton_module, "triton", counted)
    nats = []
    for name in ("triton", "reference"):
        model = small_model(attention=name, d_head=16, n_layer=2, mem_len=5, **options).double()
        masks = LaneDropoutMasks(seed=1, step=2, lanes=[0, 1])
        nats_BN, _ = read_stream(model, random_text(2, 7), tgt_len=3, masks=masks)
        nats.append(nats_BN.detach())
    assert dimensions == [3] * 4
    assert_close(nats[0], nats[1])


def test_keys_and_values_may_be_views_of_longer_buffers(use_tiles: Any) -> None:
    """Those of a KV cache are; rotated keys are not, but their values still are."""
    use_tiles((8, 4))
    inputs = CASES["one query, full memory"].inputs()
    longer = [torch.nn.functional.pad(x, (0, 0, 2, 3)) for x in (inputs.k_HBSK, inputs.v_HBSK)]
    views = [x[:, :, 2:-3] for x in longer]
    assert not views[1].is_contiguous()
    with torch.no_grad():
        expected = inputs.run(reference)
        for k, v in (views, (inputs.k_HBSK, views[1])):
            assert_close(replace(inputs, k_HBSK=k, v_HBSK=v).run(triton), expected)


def test_a_mask_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read the reach of each query, B times T numbers."""
    seen: list[Visibility] = []

    def attention(*arguments: Any) -> Tensor:
        seen.append(arguments[4])
        return torch.zeros(2, 3, 3, 4, dtype=torch.float64)

    monkeypatch.setattr("txl_dist.model.attention.triton.triton", attention)
    model, text_BT = small_model(attention="triton", same_length=True), random_text(2, 3)
    age_BT = torch.tensor([[7, 0, 1], [2, 3, 4]])
    model(text_BT, text_BT, age_BT, model.empty_memory(2))
    assert seen[0].mask_BTS is None
    assert seen[0].reach_BT.tolist() == [[4, 0, 1], [2, 3, 4]]


def test_a_score_says_which_kernel_computed_it() -> None:
    scorer = Scorer(
        model=small_model(attention="triton"),
        source=TextSource([[[0, 1, 2]]]),
        tgt_len=3,
        reset="document",
        batch_chunks=1,
        byte_counts_V=torch.ones(11),
    )
    assert scorer.kernel == "triton on cpu"


@pytest.mark.parametrize("attention_weights", ["triton", "reference"])
def test_saved_for_backward_is_one_tensor_of_scores(attention_weights: str) -> None:
    """Only scores by distance, [H, C, B, N, W]; `reference` stores several of [H, B, T, S]."""
    num_scores = 0
    shape = (3, 8, 2, 1, 16) if attention_weights == "triton" else (3, 2, 3, 8)
    # K is large, so that no other tensor has as many numbers as the scores.
    inputs = Inputs.of([2, 3, 5, 3, 17], "paper")

    def pack(tensor: Tensor) -> Tensor:
        nonlocal num_scores
        num_scores += tensor.numel() == math.prod(shape)
        return tensor

    implementation = triton if attention_weights == "triton" else reference
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Inputs(
            *(mode.from_tensor(x) for x in (inputs.q_HBTK, inputs.k_HBSK, inputs.v_HBSK)),
            inputs.terms,
            inputs.visibility,
            None,
        )
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            fake.run(implementation)
    assert num_scores == 1 if implementation is triton else num_scores > 1


@pytest.mark.slow
def test_the_model_imports_triton_only_to_run_a_kernel() -> None:
    code = """if True:
        import sys, torch
        from txl_dist.model.transformer_xl import ModelConfig, TransformerXL
        import txl_dist.model.attention.triton
        model = TransformerXL(ModelConfig(vocab_size=11, n_layer=1))
        text = torch.zeros(1, 2, dtype=torch.int64)
        model(text, text, text, model.empty_memory(1))
        sys.exit("triton" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def nats_and_gradients(model: TransformerXL, masks: LaneDropoutMasks | None) -> list[Any]:
    """Of the second of two segments."""
    text_BT, age_BT = random_text(2, 3), torch.tensor([[4, 0, 1], [2, 3, 4]])
    memory = model.empty_memory(2)
    for _ in range(2):
        nats_BT, memory = model(text_BT, text_BT, age_BT, memory, masks)
    nats_BT.sum().backward()
    return [nats_BT.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("recompute_layers", [False, True])
def test_a_model_has_the_same_gradients_with_dropout_and_recomputed_layers(
    recompute_layers: bool,
) -> None:
    """The masks of training. `triton` reads their bits, `reference` their factors."""
    masks, results = LaneDropoutMasks(seed=3, step=5, lanes=[4, 2]), []
    for implementation in ("reference", "triton"):
        model = small_model(attention=implementation, dropatt=0.3)
        model.recompute_layers = recompute_layers
        results.append(nats_and_gradients(model, masks))
    assert_close(*results)


@pytest.mark.slow
def test_a_compiled_layer_has_the_operators_in_one_graph() -> None:
    """torch.compile sees two operators with known shapes; no part of the layer runs outside."""
    eager, compiled = small_model(attention="triton"), small_model(attention="triton")
    options = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
    compiled.compute_layer = torch.compile(compiled.compute_layer, **options)
    assert_close(nats_and_gradients(compiled, None), nats_and_gradients(eager, None))


def test_heads_and_lanes_of_a_large_batch_fit_in_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has at most 65,535 programs on all axes but the first; the interpreter has no limit."""
    from txl_dist.model.attention import triton_launch

    grids = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *arguments, **constants: None

    for name in triton_launch._KERNELS:
        monkeypatch.setattr(triton_launch, name, Recorder(name))
    H, B, T, K = 16, 4097, 2, 16
    q, k, v = (torch.zeros(H, B, T, K, requires_grad=True) for _ in range(3))
    reach = torch.zeros(B, T, dtype=torch.int32)
    mixed, _ = torch.ops.txl_dist.relative_attention(q, k, v, None, reach, None, 0.0)
    mixed.sum().backward()
    assert len(grids) == 3
    for tiles, *others in grids:
        assert tiles * math.prod(others) == H * B
        assert all(number <= 65_535 for number in others)


SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory of a multiprocessor of an A100 and an H100."""
MOST_SPILLED_BYTES = 164
"""Per thread. In the worst case, d_head 128 in fp32; bf16 at most 100 on an A100, 32 on an H100."""


def compiled(*words: str) -> list[dict[str, Any]]:
    """What the compiler says about each kernel (tests/support/triton_compiler.py)."""
    report = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_compiler", *words],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert report.returncode == 0, report.stderr
    return [json.loads(line) for line in report.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [("1", "32"), ("3", "1"), ("1", "1")], ids=" ".join)
def test_the_kernels_compile_for_one_lane_and_one_token(sizes: tuple[str, str]) -> None:
    """Triton compiles an argument of 1 as a constant, which has no methods of a tensor."""
    assert len(compiled("90", "bfloat16", "64", *sizes)) == 5


@pytest.mark.slow
# 48: heads of 41 channels with their padding. They have the tiles of 64.
@pytest.mark.parametrize("d_head", ["48", "128"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_two_programs_per_multiprocessor(
    capability: int, dtype: str, d_head: str
) -> None:
    results = compiled(str(capability), dtype, d_head)
    assert [result["kernel"] for result in results] == [
        "forward_kernel",
        "query_gradient_kernel",
        "key_value_gradient_kernel",
        "_scale_kernel",
        "_bits_kernel",
    ]
    for result in results:
        assert result["spilled_bytes"] <= MOST_SPILLED_BYTES, result
        assert 2 * result["shared_bytes"] <= SHARED_BYTES[capability], result
