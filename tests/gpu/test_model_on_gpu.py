"""On a GPU the model has the numbers of the CPU: values, gradients, masks and the golden files."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.gpu import DEVICE
from tests.support.keep_bits import unpack
from tests.support.small_models import random_text
from tests.txl_dist.model.test_golden import FILES, WITHOUT_EXTENSION, load
from tests.txl_dist.training.test_fake_cuda import ENCODINGS, SOFTMAXES, build
from txl_dist.model import vocabulary
from txl_dist.model.attention import choose_implementation
from txl_dist.model.choices import ATTENTION_IMPLEMENTATIONS
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import Dropout, LaneDropoutMasks, on_device
from txl_dist.model.memory.recurrent import KVCache, RecurrentMemory
from txl_dist.model.transformer_xl import TransformerXL

pytestmark = pytest.mark.gpu

LANES, TGT_LEN = 3, 4
IMPLEMENTATIONS = [name for name, each in ATTENTION_IMPLEMENTATIONS.items() if not each.is_for_cpus]
every_form = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def nats_memory_and_gradients(
    model: TransformerXL, masks: LaneDropoutMasks | None = None
) -> list[Tensor]:
    """Of two segments of random text, on the CPU; targets are on the host."""
    device = model.table.weights[0].device
    text_BN = random_text(LANES, 2 * TGT_LEN + 1)
    age_BN = torch.arange(2 * TGT_LEN, device=device).expand(LANES, -1)
    memory, nats = model.empty_memory(LANES), []
    for start in (0, TGT_LEN):
        columns = slice(start, start + TGT_LEN)
        target_BT = text_BN[:, start + 1 : start + TGT_LEN + 1]
        nats_BT, memory = model(
            text_BN[:, columns].to(device), target_BT, age_BN[:, columns], memory, masks
        )
        nats.append(nats_BT)
    torch.cat(nats).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [x.detach().cpu() for x in (*nats, *memory.layers, *gradients)]


def assert_same_on_gpu(
    model: TransformerXL,
    masks: LaneDropoutMasks | None = None,
    *,
    rtol: float = 1e-10,
    atol: float = 1e-10,
) -> None:
    on_gpu = deepcopy(model).to(DEVICE)
    actual, expected = (nats_memory_and_gradients(each, masks) for each in (on_gpu, model))
    assert_close(actual, expected, rtol=rtol, atol=atol)


@every_form
@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_values_memory_and_gradients_in_float64(
    encoding: str, softmax: str, implementation: str
) -> None:
    model = build(encoding, softmax, {"attention": implementation, "n_layer": 2})
    assert_same_on_gpu(model)


@every_form
def test_values_memory_and_gradients_in_fp32(implementation: str) -> None:
    model = build(
        "sinusoidal", "adaptive, narrower", {"attention": implementation, "n_layer": 2}
    ).float()
    assert_same_on_gpu(model, rtol=1e-3, atol=1e-4)


def test_logits_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("sinusoidal", "adaptive", {})
    monkeypatch.setattr(vocabulary, "MAX_LOGITS", 20)
    assert_same_on_gpu(model)


@pytest.mark.parametrize("columns", [256, 4104, 5003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cross_entropy_by_kernels(dtype: torch.dtype, columns: int) -> None:
    """Nats and gradients, in one chunk and in several; in bf16 by autocast."""
    generator, wide = torch.Generator().manual_seed(0), torch.promote_types(dtype, torch.float32)
    shapes = ((9, 64), (columns, 64), (columns,), (9,))
    *tensors, d_nats_N = (torch.randn(s, generator=generator, dtype=wide) for s in shapes)
    tensors[0] /= 8  # small logits: those near a tie may be rounded to another bf16
    target_N = torch.randint(columns, (9,), generator=generator)
    target_N[3] = vocabulary.IGNORED

    def results(nats_of: Callable[..., Tensor], device: torch.device) -> list[Tensor]:
        leaves = [x.to(device).requires_grad_() for x in tensors]
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype != wide):
            nats_N = nats_of(*leaves, target_N.to(device))
        gradients = torch.autograd.grad(nats_N, leaves, d_nats_N.to(device))
        return [x.detach().cpu() for x in (nats_N, *gradients)]

    def equation(x_NE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_N: Tensor) -> Tensor:
        logits_NV = torch.nn.functional.linear(x_NE, weight_VE, bias_V).to(wide)
        return torch.nn.functional.cross_entropy(
            logits_NV, target_N, ignore_index=vocabulary.IGNORED, reduction="none"
        )

    expected = results(equation, torch.device("cpu"))
    for max_logits in (2**27, 4 * columns):
        by_kernels = partial(vocabulary.linear_cross_entropy, max_logits=max_logits)
        actual, again = (results(by_kernels, DEVICE) for _ in range(2))
        assert all(map(torch.equal, actual, again))
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype == wide
            tolerance = 1e-10 if dtype == wide else 5e-2
            assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_kernels_of_the_cross_entropy_round_only_results_to_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    logit_RV = (4 * torch.randn(5, 4104, generator=generator)).bfloat16()
    target_R = torch.tensor([0, 4103, 7, vocabulary.IGNORED, 100])
    d_nats_R = torch.randn(5, generator=generator)
    exact_RV = logit_RV.double().requires_grad_()
    exact_R = torch.nn.functional.cross_entropy(
        exact_RV, target_R, ignore_index=vocabulary.IGNORED, reduction="none"
    )
    (expected_RV,) = torch.autograd.grad(exact_R, exact_RV, d_nats_R.double())
    total_R, nats_R = torch.empty(2, 5, device=DEVICE)
    logit_RV, target_R, d_nats_R = (x.to(DEVICE) for x in (logit_RV, target_R, d_nats_R))
    torch.ops.txl_dist.cross_entropy(logit_RV, target_R, total_R, nats_R)
    torch.ops.txl_dist.cross_entropy_backward_(logit_RV, target_R, total_R, d_nats_R)
    assert_close(nats_R.cpu().double(), exact_R, rtol=1e-5, atol=1e-5)
    # Triton's interpreter does not round to the nearest: one unit in the last place.
    assert_close(logit_RV.cpu().double(), expected_RV, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("seed", "step"), [(0, 1), (2**63 - 1, 2**40 + 3)])
def test_dropout_masks_have_the_bits_of_the_cpu(seed: int, step: int, dtype: torch.dtype) -> None:
    masks = LaneDropoutMasks(seed=seed, step=step, lanes=[0, 7, 2**31, -1])
    for by_lane, shape in ((True, (4, 3, 1037)), (False, (129, 65))):
        x, dropout = (
            torch.empty(shape, dtype=dtype),
            Dropout(0.3, layer=3, place="inner", by_lane=by_lane),
        )
        expected = masks.scale(x, dropout)
        on_gpu = on_device(masks, DEVICE).scale(x.to(DEVICE), dropout.to(DEVICE))
        assert torch.equal(on_gpu.cpu(), expected)


def test_dropout_bits_are_those_of_the_mask() -> None:
    masks = LaneDropoutMasks(seed=2**63 - 1, step=2**40 + 3, lanes=[0, 7, 2**31, -1])
    for shape in ((4, 2, 3, 96), (4, 2, 3, 1037)):
        x, dropout = torch.empty(shape), Dropout(0.3, layer=3, place="attention weights")
        expected = masks.scale(x, dropout)
        bits = on_device(masks, DEVICE).keep_bits(x.to(DEVICE), dropout.to(DEVICE))
        on_host = bits._replace(words=bits.words.cpu())
        assert torch.equal(unpack(on_host, shape), expected)


@every_form
def test_values_memory_and_gradients_with_dropout(implementation: str) -> None:
    """In float64, with masks that each device computes itself."""
    options = {"attention": implementation, "n_layer": 2, "dropout": 0.1, "dropatt": 0.3}
    model = build("sinusoidal", "plain", options)
    assert_same_on_gpu(model, LaneDropoutMasks(seed=3, step=5, lanes=range(LANES)))


@every_form
@pytest.mark.parametrize("name", FILES)
def test_the_golden_files(name: str, implementation: str) -> None:
    """Nats of every segment; gradients follow from the comparison with the CPU above."""
    golden = load(FILES[name], implementation)
    model = golden.model(torch.float64).to(DEVICE)
    memory = model.empty_memory(golden.arrays["input/0"].shape[1])
    prefix = "nll" if name in WITHOUT_EXTENSION else "nv_nll"
    for k in range(sum(key.startswith("input/") for key in golden.arrays)):
        with torch.no_grad():
            nats_BT, memory = golden_segment(golden, k, model, memory)
        expected = golden.tensor(f"{prefix}/{k}").t().double()
        assert_close(nats_BT.cpu(), expected, rtol=0, atol=1e-10)


def golden_segment(
    golden: Any, k: int, model: TransformerXL, memory: RecurrentMemory
) -> tuple[Tensor, RecurrentMemory]:
    """`Golden.read` with inputs and ages on the GPU."""

    def read(input_BT: Tensor, target_BT: Tensor, age_BT: Tensor, memory: RecurrentMemory) -> Any:
        return model(input_BT.to(DEVICE), target_BT, age_BT.to(DEVICE), memory)

    return golden.read(k, read, memory)


@every_form
def test_a_kv_cache_has_the_numbers_of_the_memory(implementation: str) -> None:
    model = build("sinusoidal", "adaptive", {"attention": implementation}).float().to(DEVICE)
    text_BN = random_text(LANES, 10).to(DEVICE)
    age_BN = torch.arange(9, device=DEVICE).expand(LANES, -1)

    def nats(memory: RecurrentMemory | KVCache) -> Tensor:
        parts = []
        for start in range(0, 9, 3):
            columns = slice(start, start + 3)
            targets = text_BN[:, start + 1 : start + 4].cpu()
            nats_BT, memory = model(text_BN[:, columns], targets, age_BN[:, columns], memory)
            parts.append(nats_BT)
        return torch.cat(parts, dim=1)

    with torch.no_grad():
        cached, stored = nats(model.inference_state(LANES)), nats(model.empty_memory(LANES))
    assert_close(cached, stored, rtol=1e-3, atol=1e-4)


def test_auto_takes_a_form_for_gpus() -> None:
    config = ModelConfig(vocab_size=11)
    for with_dropout in (False, True):
        implementation = choose_implementation(config, DEVICE, with_dropout=with_dropout)
        assert implementation is not ATTENTION_IMPLEMENTATIONS["reference"]
