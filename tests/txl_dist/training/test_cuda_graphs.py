"""Layers in groups, as they are recorded: the values, gradients and memory of layers in turn.

A CPU has no CUDA graphs. Here a recording is the list of torch's operations, and a replay repeats
them on the same tensors: as on a GPU, what was not an operation of the recording does not change.
The tests on a GPU record (tests/gpu/test_training_on_gpu.py).
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu.test_graphs_on_gpu import LANES, NUM_STEPS, trained
from txl_dist.config.run_config import Precision
from txl_dist.config.training_config import OptimizerConfig, Role
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import Dropout, GpuLaneDropoutMasks, LaneDropoutMasks
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import autocast
from txl_dist.training import compilation
from txl_dist.training.compilation import RecordedLayers
from txl_dist.training.engine.optimizers import freeze

B, T, V = 2, 3, 11


@torch.library.custom_op("txl_tests::lane_mask", mutates_args=())
def lane_mask(
    numbers: Tensor, x: Tensor, rate: float, layer: Tensor, place: str, by_lane: bool
) -> Tensor:
    seed, step, *lanes = numbers.tolist()
    masks = LaneDropoutMasks(seed=seed, step=step, lanes=lanes[:-1] if by_lane else lanes[-1:])
    return masks.scale(x, Dropout(rate, layer=int(layer), place=place))  # type: ignore[arg-type]


class Masks(GpuLaneDropoutMasks):
    """Those of a GPU, drawn on the CPU by one operation."""

    def scale(self, x: Tensor, dropout: Dropout) -> Tensor:
        place = dropout.rate, dropout.layer_number, dropout.place, dropout.by_lane
        mask: Tensor = lane_mask(self.numbers, x.detach(), *place)
        return mask


class Recording(TorchDispatchMode):
    """The operations inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        results = operation(*arguments, **(options or {}))
        self.operations.append((operation, arguments, options or {}, results))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        with torch.autocast("cpu", enabled=False):
            for operation, arguments, options, results in self.operations:
                again = operation(*arguments, **options)
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    # Views and results of operations in place are where they were.
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.data.copy_(new)


Recordings = list[Recording]


def model_of(num_layers: int = 2, *, is_recorded: bool = True, **options: Any) -> TransformerXL:
    sizes = {"vocab_size": V, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12, "mem_len": 5}
    model = TransformerXL(ModelConfig(**{"n_layer": num_layers, **sizes, **options}), seed=1)
    if is_recorded:
        model.recorded_layers = RecordedLayers(model)
    return model


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """What is recorded."""
    all_recordings: Recordings = []

    def recorded(compute: Callable[[], None], pool: None) -> Callable[[], None]:
        with Recording() as recording:
            compute()
        all_recordings.append(recording)
        return recording.replay

    monkeypatch.setattr(compilation, "recorded", recorded)
    monkeypatch.setattr(compilation, "WARM_UP_CALLS", 1)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Mock)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(compilation, "GpuLaneDropoutMasks", Masks)
    return all_recordings


def steps(
    model: TransformerXL, *, has_masks: bool = False, precision: Precision = "fp32"
) -> Iterator[tuple[Tensor, Any]]:
    """The losses and the memory after each of three steps, which have added gradients."""
    memory, generator = model.empty_memory(B), torch.Generator().manual_seed(2)
    for step in range(3):
        text_BT = torch.randint(V, (B, T + 1), generator=generator)
        age_BT = torch.arange(T).expand(B, -1) + step * T
        masks = Masks(torch.tensor([3, step, 0, 1, 2**32 - 1])) if has_masks else None
        with autocast(precision, torch.device("cpu")):
            nats_BT, memory = model(text_BT[:, :-1], text_BT[:, 1:], age_BT, memory, masks)
        nats_BT.sum().backward()
        yield nats_BT.detach(), memory


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"untie_r": False},
        {"distance_encoding": "rotary", "qk_norm": True, "pre_lnorm": True, "norm": "rmsnorm"},
        {"distance_encoding": "alibi", "mem_shares": (0.4, 1.0)},
        {"distance_encoding": "shaw", "clamp_len": 4},
    ],
    ids=str,
)
def test_groups_have_the_results_of_layers_in_turn(
    options: dict[str, Any], recordings: Recordings
) -> None:
    results = []
    for is_recorded in (False, True):
        model = model_of(6, is_recorded=is_recorded, dropout=0.2, **options)
        *_, last = numbers = [*steps(model, has_masks=True)]
        gradients = {name: x.grad for name, x in model.named_parameters()}
        results.append(([nats_BT for nats_BT, _ in numbers], last[1].tensors(), gradients))
    (*expected, expected_gradients), (*actual, actual_gradients) = results
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    # Those of shared parameters are summed by group.
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=1e-5, atol=1e-9)
    assert len(recordings) == 2 * 2  # groups of 4 and 2 layers, each forward and backward


@pytest.mark.parametrize(
    ("frozen", "num_recordings"),
    [
        (["hidden"], 4),
        (["hidden", "embedding"], 4),
        (["hidden", "other"], 4),
        (["hidden", "embedding", "other"], 0),
    ],
)
def test_frozen_parts_have_no_gradients(
    frozen: list[Role], num_recordings: int, recordings: Recordings
) -> None:
    """Layers with nothing to train before them and in them are not recorded."""
    config = ModelConfig(
        vocab_size=V, n_layer=6, d_model=8, n_head=2, d_head=4, d_inner=12, mem_len=5,
        tie_weight=False,
    )  # fmt: skip
    text_BT, age_BT = torch.arange(B * (T + 1)).view(B, -1) % V, torch.arange(T).expand(B, -1)
    results = []
    for is_recorded in (False, True):
        model = TransformerXL(config, seed=1)
        freeze(model, OptimizerConfig(lr_factors=dict.fromkeys(frozen, 0.0)))
        if is_recorded:
            model.recorded_layers = RecordedLayers(model)
        memory = model.empty_memory(B)
        nats_BT, _ = model(text_BT[:, :-1], text_BT[:, 1:], age_BT, memory)
        nats_BT.sum().backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-9)
    assert len(recordings) == num_recordings


def test_other_shapes_and_addresses_are_recorded_again(recordings: Recordings) -> None:
    model = model_of()

    def read(num_lanes: int) -> None:
        token_BT = torch.zeros(num_lanes, T, dtype=torch.int64)
        model(token_BT, token_BT, token_BT, model.empty_memory(num_lanes))

    read(B)
    read(B)
    assert len(recordings) == 2
    read(B + 1)
    assert len(recordings) == 4
    weight = next(model.layers.parameters())
    weight.data = weight.data.clone()
    read(B + 1)
    assert len(recordings) == 6
    with torch.no_grad():
        read(B)
    assert len(recordings) == 6


def test_a_model_of_vectors_without_gradient_is_recorded(recordings: Recordings) -> None:
    model, x_BTD = model_of(5, is_recorded=False, vocab_size=None), torch.ones(B, T, 8)
    age_BT = torch.zeros(B, T, dtype=torch.int64)
    expected, _ = model.hidden(x_BTD, age_BT, model.empty_memory(B))
    model.recorded_layers = RecordedLayers(model)
    actual, _ = model.hidden(x_BTD, age_BT, model.empty_memory(B))
    assert torch.equal(actual, expected)
    assert len(recordings) == 4


def test_backward_after_another_forward_is_refused(recordings: Recordings) -> None:
    model = model_of()
    token_BT = torch.zeros(B, T, dtype=torch.int64)
    first_BT, memory = model(token_BT, token_BT, token_BT, model.empty_memory(B))
    second_BT, _ = model(token_BT, token_BT, token_BT, memory)
    second_BT.sum().backward()
    with pytest.raises(RuntimeError, match="call backward before the next forward"):
        first_BT.sum().backward()


def test_resets_turns_and_an_evaluation_between_steps(recordings: Recordings) -> None:
    """Recorded in the first step, with other ages, memories and dropout masks than later ones."""
    masks = [Masks(torch.tensor([3, step, *range(LANES), 2**32 - 1])) for step in range(NUM_STEPS)]
    expected, actual = (
        trained(torch.device("cpu"), masks, prepare)
        for prepare in (lambda model: None, cuda_graphs_of)
    )
    assert len(recordings) == 2 * 2
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def cuda_graphs_of(model: TransformerXL) -> None:
    model.recorded_layers = RecordedLayers(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_replay_reads_the_weights_of_its_step(
    precision: Precision, recordings: Recordings
) -> None:
    """Layers that are not compiled cast their weights, and autocast caches the casts of a forward.

    A cast outside the recording would be that of the first step for ever.
    """
    results = []
    for is_recorded in (False, True):
        model, numbers = model_of(5, is_recorded=is_recorded), []
        for nats_BT, _ in steps(model, precision=precision):
            numbers.append(nats_BT)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad, alpha=-0.1)
                    parameter.grad = None
        results.append(numbers)
    assert len(recordings) == 2 * 2
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_only_the_step_touches_gradients_of_parameters(recordings: Recordings) -> None:
    """Not what is recorded: DeepSpeed's hooks would run, on another stream of the GPU."""
    model = model_of()
    calls = []
    for parameter in model.layers.parameters():
        parameter.register_hook(lambda gradient, parameter=parameter: calls.append(id(parameter)))
    before = list(model.layers.parameters())
    token_BT = torch.zeros(B, T, dtype=torch.int64)
    nats_BT, _ = model(token_BT, token_BT, token_BT, model.empty_memory(B))
    nats_BT.sum().backward()
    assert sorted(calls) == sorted(map(id, before))
    assert all(x is y for x, y in zip(model.layers.parameters(), before, strict=True))


def test_recorded_gradients_are_not_added_by_nodes_of_the_warm_up(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node runs on the CUDA stream on which it was created; recording uses another stream."""
    found: list[bool] = []
    warm_up = compilation._warm_up

    def nodes_of(group: compilation.LayerGroup) -> set[Any]:
        nodes: set[Any] = set()
        waiting = [group.output_BTD.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [other for other, _ in node.next_functions]
        return {node for node in nodes if node.name() == "torch::autograd::AccumulateGrad"}

    def forward(group: compilation.LayerGroup) -> None:
        compute(group)
        for node in nodes_of(group):
            if is_warm_up:
                node.metadata["warm"] = True
            else:
                found.append("warm" in node.metadata)

    def mark(group: compilation.LayerGroup) -> None:
        nonlocal is_warm_up
        is_warm_up = True
        warm_up(group)
        is_warm_up = False

    is_warm_up, compute = False, compilation.LayerGroup.forward
    monkeypatch.setattr(compilation.LayerGroup, "forward", forward)
    monkeypatch.setattr(compilation, "_warm_up", mark)
    next(steps(model_of()))
    assert found
    assert not any(found)


def test_a_step_copies_what_layers_share_once(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each copy is an operation that the host starts: of small models it is the limit."""
    copied: list[list[Tensor]] = []
    cloned: list[list[Tensor]] = []

    def spy(name: str, calls: list[list[Tensor]]) -> None:
        function = getattr(torch, name)

        def called(tensors: Any, *others: Any) -> Any:
            calls.append(list(tensors))
            return function(tensors, *others)

        monkeypatch.setattr(torch, name, called)

    spy("_foreach_copy_", copied)
    spy("_foreach_mul", cloned)
    shared = []
    for num_layers in (4, 12):
        model, kept = model_of(num_layers, dropout=0.2), []
        for number, _ in enumerate(steps(model, has_masks=True)):
            num_tensors = sum(map(len, copied))
            if number:  # the first step records; x of the first group, and a memory for each layer
                shared.append(num_tensors - 1 - num_layers)
            assert len(cloned) == num_layers // 4, "one operation for the gradients of a graph"
            gradients = {name: x.grad for name, x in model.named_parameters()}
            kept.append((gradients, {name: x.clone() for name, x in gradients.items()}))
            model.zero_grad(set_to_none=True)
            copied.clear(), cloned.clear()
        for gradients, expected in kept:
            torch.testing.assert_close(gradients, expected, rtol=0, atol=0)  # no later step's
    assert len(set(shared)) == 1, "as many of 12 layers as of 4"
    assert shared[0] == 4, (
        "reach and mask of the ages, numbers of the masks, distances after dropout"
    )
