"""`training.compile`: the layers of the model compiled by torch.compile, before the first step.

Only layers are compiled, and all of them share one function: the tables, the softmax and the memory
are few operations of large tensors. Evaluation runs uncompiled, because its shapes vary. On CPUs
two parts run between graphs: the drawing of dropout masks by numpy, and `attention: cpu`
(torch_attention.py), which is one autograd node with in-place operations that torch.compile
refuses. That node is faster than a compiled one, so the feed-forward layers and norms are compiled.

On GPUs a layer is one graph, and `training.compile: true` records compiled layers as CUDA graphs,
which the host starts as one: the forward of a few layers is one graph, their backward another. What
surrounds the layers stays outside: the rows of an adaptive softmax's clusters change from step to
step. They are recorded in the first step, when DeepSpeed has given the parameters their addresses,
and again if an address or a shape changes.

A CUDA graph reads its inputs from, and writes its results to, memory of its own, which the next
micro-batch overwrites. So inputs are copied, except parameters: what all layers read (masks,
distances) once, and only if it has changed, the memories of a graph by one operation. Gradients of
parameters are copied by one operation per graph, too. Memories that a model returns are copies in
any case (`SequenceState.after`).

Not `torch.cuda.make_graphed_callables`: it does not allow other threads to use CUDA while it
records, as NCCL's does, and it copies what one graph passes to the next.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import register_dataclass, tree_flatten, tree_leaves, tree_unflatten

from txl_dist.config.run_config import RunConfig
from txl_dist.model.attention import SegmentContext, choose_implementation
from txl_dist.model.dropout import Dropout, GpuLaneDropoutMasks, LaneDropoutMasks
from txl_dist.model.encodings import DistanceTerms
from txl_dist.model.transformer_xl import Layer, TransformerXL
from txl_dist.model.visibility import Visibility
from txl_dist.runtime.device import TORCH_DTYPE, autocast
from txl_dist.runtime.world import World
from txl_dist.training.engine.optimizers import freeze

# Shapes: B lanes, T segment tokens, D d_model

VECTOR_BYTES = 16
"""Size of the largest load instruction of a GPU, whose address must be a multiple of it."""
LAYERS_PER_GRAPH = 4
"""Gradients of a group can be reduced between GPUs while the next one is computed."""
WARM_UP_CALLS = 2
"""Compilers and libraries allocate what they keep. The first call may compile."""

register_dataclass(DistanceTerms)
register_dataclass(Visibility)


def compile_layers(
    model: TransformerXL, config: RunConfig, world: World, *, lanes: Sequence[int]
) -> None:
    """Compile the layers for micro-batches of `lanes`, which takes a minute or more.

    Call before DeepSpeed takes over the model: until the first step, a stop request ends the
    process immediately, and no rank waits in a collective. On CPUs torch needs a C++ compiler.
    """
    device, is_recorded = world.device, records_graphs(config, world.device)
    model.to(device)
    freeze(model, config.optimizer)  # a parameter that loses its gradient later compiles again
    compile_model(model, device)
    # A forward and backward of zeros, with the shapes, types and precision of training, or the
    # first step would compile again.
    shape, dtype = (len(lanes), config.data.tgt_len), TORCH_DTYPE[config.training.memory_dtype]
    memory = model.empty_memory(len(lanes), dtype=dtype)
    token_BT = torch.zeros(shape, dtype=torch.int64, device=device)
    age_BT = torch.zeros(shape, dtype=torch.int32, device=device)
    masks = LaneDropoutMasks(seed=config.seed, step=0, lanes=lanes)
    with _at_any_address(list(model.parameters())):
        # Compiled code is for this state of the cache, too; it is off in recordings.
        with autocast(config.precision, device, cache_enabled=not is_recorded):
            segments = config.training.backprop_segments
            nats_BT, _ = model(token_BT, token_BT, age_BT, memory, masks, segments)
        nats_BT.sum().backward()
    model.zero_grad(set_to_none=True)
    if is_recorded:
        record_layers(model, device)


def records_graphs(config: RunConfig, device: torch.device) -> bool:
    """Whether compiled layers are recorded as CUDA graphs.

    Not with activation checkpointing, which runs layers again in backward, and not with several
    segments per step: the graphs of one would overwrite what backward needs of the one before.
    """
    training = config.training
    return (
        device.type == "cuda"
        and training.compile is True
        and not training.activation_checkpointing
        and training.backprop_segments == 1
    )


def compile_model(model: TransformerXL, device: torch.device) -> None:
    """Let the next forward compile the layers. On GPUs, dropout masks by lane are operators of the
    compiled graph.
    """
    with_dropout = model.config.dropatt > 0
    attention = choose_implementation(model.config, device, with_dropout=with_dropout)
    if not attention.can_be_compiled:
        for layer in model.layers:
            assert isinstance(layer, Layer)
            layer.attention.forward = torch.compiler.disable(  # type: ignore[method-assign]
                layer.attention.forward
            )
    for module in model.modules():
        if isinstance(module, Dropout) and device.type != "cuda":
            # numpy draws; code would be compiled again for every layer.
            for name in ("draw", "draw_bits"):
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
    # All models of a process share one function, and torch counts the variants of all of them. Over
    # the limit, layers would run uncompiled after a line in the log: raise an error instead.
    torch.compiler.reset()
    dynamo_config = torch._dynamo.config
    dynamo_config.fail_on_recompile_limit_hit = True
    # One graph per memory length, and one more where the memory has a gradient.
    dynamo_config.recompile_limit = max(
        dynamo_config.recompile_limit, 2 * len({*model.config.mem_lens})
    )
    # dynamic=False: all segments have one shape.
    model.compute_layer = torch.compile(model.compute_layer, dynamic=False)


@contextmanager
def _at_any_address(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Parameters at odd addresses, if training may have any of them at such an address.

    DeepSpeed replaces the parameters by slices of one tensor. torch's compiler takes for granted
    that those which are aligned when it compiles remain so: on a GPU, vector loads would end the
    run with "misaligned address".
    """
    aligned = [parameter.data for parameter in parameters]
    if any(parameter.nbytes % VECTOR_BYTES for parameter in parameters):
        for parameter in parameters:
            data = parameter.data
            parameter.data = torch.cat([data.new_zeros(1), data.flatten()])[1:].view_as(data)
    try:
        yield
    finally:
        for parameter, data in zip(parameters, aligned, strict=True):
            parameter.data = data


# --- CUDA graphs ----------------------------------------------------------------------------------


def record_layers(model: TransformerXL, device: torch.device) -> None:
    """Let the model record its layers in the next forward with gradients. On CPUs: nothing.

    The next forward overwrites what `run_layers` returns, so use it before.
    """
    if device.type == "cuda":
        model.recorded_layers = RecordedLayers(model)


class RecordedLayers:
    """`TransformerXL.run_layers`, replayed. Without gradients it is that method."""

    def __init__(self, model: TransformerXL) -> None:
        self._model = model
        self._key: object = None
        self._groups: list[LayerGroup] = []
        self._own = OwnInputs()

    def __call__(
        self, x_BTD: Tensor, pasts: Iterable[Any], contexts: Sequence[SegmentContext]
    ) -> list[Tensor]:
        parameters = _parameters(self._model, self._model.layers)
        is_trained = any(x.requires_grad for x in (x_BTD, *parameters))
        if not (torch.is_grad_enabled() and is_trained):
            return self._model.run_layers(x_BTD, pasts, contexts)
        pasts = tuple(pasts)
        starts = range(0, len(self._model.layers), LAYERS_PER_GRAPH)
        ranges = [slice(start, start + LAYERS_PER_GRAPH) for start in starts]
        inputs = [
            (x_BTD, pasts[layers], tuple(map(_tensors_of, contexts[layers]))) for layers in ranges
        ]
        leaves = tree_leaves(inputs)
        kinds = [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in leaves]
        same = _first_places(leaves)
        addresses = [x.data_ptr() for x in parameters]
        device = x_BTD.device.type
        dtype = torch.get_autocast_dtype(device)
        key = kinds, same, addresses, torch.is_autocast_enabled(device), dtype
        if key != self._key:
            self._groups, self._key, self._own = [], None, OwnInputs()  # before others take memory
            self._groups = [
                LayerGroup(self._model, layers, contexts[layers], each, self._own)
                for layers, each in zip(ranges, inputs, strict=True)
            ]
            # Without the cache: a cast that it keeps would be read by every replay, and layers that
            # are not compiled (TORCH_COMPILE_DISABLE=1) would train on the weights of this step.
            with torch.autocast(
                device, dtype, enabled=torch.is_autocast_enabled(device), cache_enabled=False
            ):
                _record(self._groups)
            self._key = key
        hidden = []
        for group, (_, *others) in zip(self._groups, inputs, strict=True):
            x_BTD = group(x_BTD, *others)
            hidden += group.hidden
        return [*hidden, x_BTD]


class OwnInputs:
    """The tensors from which graphs read what has no gradient. Groups of layers share them."""

    def __init__(self) -> None:
        self._own: dict[int, Tensor] = {}
        """By the identity of the tensor with which the graphs are recorded."""
        self._newest: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """By the identity of the own tensor: what it has a copy of, in which version."""

    def of(self, x: Tensor) -> Tensor:
        """The own tensor of an input. A recording keeps its inputs alive."""
        if x.requires_grad:
            return x.detach().clone().requires_grad_()
        if id(x) not in self._own:
            self._own[id(x)] = x.clone()
        return self._own[id(x)]

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy (own, new) where `new` is another tensor or has changed since the last copy."""
        by_dtype = defaultdict(list)
        for own, new in pairs:
            known, version = self._newest.get(id(own), (None, -1))
            if own.data_ptr() == new.data_ptr() or (
                known is not None and known() is new and version == new._version
            ):
                continue
            if not own.requires_grad:
                self._newest[id(own)] = weakref.ref(new), new._version
            by_dtype[own.dtype].append((own.detach(), new.detach()))
        for same in by_dtype.values():
            owns, news = zip(*same, strict=True)
            torch._foreach_copy_(owns, news)


def _first_places(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the place of the first one that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(x), place) for place, x in enumerate(tensors)]


class LayerGroup:
    """group(x_BTD, pasts, tensors of contexts) -> the last layer's output."""

    d_output_BTD: Tensor
    replay_forward: Callable[[], None]
    replay_backward: Callable[[], None]
    num_replays = 0

    def __init__(
        self,
        model: TransformerXL,
        layers: slice,
        contexts: Sequence[SegmentContext],
        inputs: tuple[Any, ...],
        own: OwnInputs,
    ) -> None:
        self._model, self._start, self._contexts = model, layers.start, contexts
        self.own = own
        self.parameters = _parameters(model, model.layers[layers])
        self._own_leaves = [nn.Parameter(p.detach(), p.requires_grad) for p in self.parameters]
        leaves, self._structure = tree_flatten(inputs)
        places = _first_places(leaves)
        self._distinct = sorted(set(places))
        self._numbers = [self._distinct.index(place) for place in places]
        self.inputs = [own.of(leaves[place]) for place in self._distinct]
        """Where the graph reads its inputs, each tensor once."""

    def __call__(self, *inputs: Any) -> Tensor:
        leaves = tree_leaves(inputs)
        distinct = [leaves[place] for place in self._distinct]
        output_BTD: Tensor = _Replay.apply(self, *distinct, *self.parameters)
        return output_BTD

    def forward(self) -> None:
        """Compute the layers from `self.inputs`."""
        leaves = [self.inputs[number] for number in self._numbers]
        x_BTD, pasts, tensors = tree_unflatten(leaves, self._structure)
        model = self._model
        with _exchanged(model, self.parameters, self._own_leaves):
            contexts = [
                replace(
                    context,
                    distances=distances,
                    biases_HK=model.shared_biases,
                    visibility=visibility,
                    dropout_masks=GpuLaneDropoutMasks(*numbers) if numbers else None,
                )
                for context, (distances, visibility, *numbers) in zip(
                    self._contexts, tensors, strict=True
                )
            ]
            *hidden, self.output_BTD = model.run_layers(x_BTD, pasts, contexts, start=self._start)
        # The input of each layer; a replay overwrites them.
        self.hidden = [x.detach() for x in hidden]

    def backward(self) -> None:
        """Compute `self.gradients` of inputs and parameters from `self.d_output_BTD`."""
        tensors = [*self.inputs, *self._own_leaves]
        gradients = torch.autograd.grad(
            self.output_BTD,
            [x for x in tensors if x.requires_grad],
            self.d_output_BTD,
            allow_unused=True,
        )
        remaining = iter(gradients)
        self.gradients = [next(remaining) if x.requires_grad else None for x in tensors]


class _Replay(Function):
    @staticmethod
    def forward(ctx: Any, group: LayerGroup, *tensors: Tensor) -> Tensor:
        group.num_replays += 1
        ctx.group, ctx.number = group, group.num_replays
        group.own.copy(zip(group.inputs, tensors, strict=False))  # parameters are where they were
        group.replay_forward()
        return group.output_BTD.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        group: LayerGroup = ctx.group
        if ctx.number != group.num_replays:
            raise RuntimeError(
                "backward of a forward whose activations another forward has overwritten: with "
                "CUDA graphs, call backward before the next forward with gradients"
            )
        (d_output_BTD,) = d_outputs
        if d_output_BTD.data_ptr() != group.d_output_BTD.data_ptr():
            group.d_output_BTD.copy_(d_output_BTD)
        group.replay_backward()
        num_inputs = len(group.inputs)
        of_inputs, gradients = group.gradients[:num_inputs], group.gradients[num_inputs:]
        present = [x for x in gradients if x is not None]
        if present and all(parameter.grad is None for parameter in group.parameters):
            # Autograd copies gradients to which there are references, one by one, before it keeps
            # them. It keeps these.
            copies = iter(torch._foreach_mul(present, 1.0))
            gradients = [None if x is None else next(copies) for x in gradients]
        return (None, *of_inputs, *gradients)


@contextmanager
def _exchanged(
    model: TransformerXL, parameters: Sequence[nn.Parameter], leaves: Sequence[nn.Parameter]
) -> Iterator[None]:
    """In which the model has other leaves of autograd, with the same memory.

    DeepSpeed keeps the nodes that accumulate gradients of the parameters, and they belong to the
    stream on which it found them, which a recording must not wait for.
    """
    leaf_of = {id(parameter): leaf for parameter, leaf in zip(parameters, leaves, strict=True)}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in leaf_of
    ]
    for module, name, parameter in places:
        setattr(module, name, leaf_of[id(parameter)])
    try:
        yield
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)


def _record(groups: Sequence[LayerGroup]) -> None:
    """Record all forwards, then all backwards, in the order of a step: they share memory."""
    for group in groups:
        _warm_up(group)
    pool = torch.cuda.graph_pool_handle()
    for group, next_group in zip(groups, [*groups[1:], None], strict=True):
        group.replay_forward = recorded(group.forward, pool)
        if next_group is not None:
            next_group.inputs[0] = group.output_BTD.detach().requires_grad_()
    d_output_BTD: Tensor | None = torch.zeros_like(groups[-1].output_BTD)
    for group in reversed(groups):
        assert d_output_BTD is not None  # the input of every group but the first has a gradient
        group.d_output_BTD = d_output_BTD
        group.replay_backward = recorded(group.backward, pool)
        group.output_BTD = group.output_BTD.detach()  # frees the activations for other graphs
        d_output_BTD = group.gradients[0]


def _warm_up(group: LayerGroup) -> None:
    """On a separate stream, as graphs are recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            group.forward()
            group.d_output_BTD = torch.zeros_like(group.output_BTD)
            group.backward()
        # The nodes that accumulate gradients would be those of this stream, and stay in memory.
        del group.output_BTD, group.hidden, group.gradients
    torch.cuda.current_stream().wait_stream(stream)


def recorded(compute: Callable[[], None], pool: Any) -> Callable[[], None]:
    """The work of `compute` on the GPU, to be repeated."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        compute()
    return graph.replay


def _parameters(model: TransformerXL, layers: nn.Module) -> list[nn.Parameter]:
    """Those that `layers` of the model read."""
    return [*layers.parameters(), *(model.shared_biases or ())]


def _tensors_of(context: SegmentContext) -> tuple[Any, ...]:
    """What differs between segments. Raises TypeError for masks that are drawn on the host."""
    masks = context.dropout_masks
    tensors = context.distances, context.visibility
    if masks is None:
        return tensors
    if not isinstance(masks, GpuLaneDropoutMasks):
        raise TypeError(f"CUDA graphs need masks by lane, drawn on the GPU; these are {masks!r}")
    return *tensors, masks.numbers
