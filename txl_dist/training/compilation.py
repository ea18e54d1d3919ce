"""`training.compile`: the layers of the model compiled by torch.compile, before the first step.

Only layers are compiled, and all of them share one function: the tables, the softmax and the memory
are few operations of large tensors. Evaluation runs uncompiled, because its shapes vary.

On GPUs a layer is one graph, and CUDA graphs of some layers are recorded (cuda_graphs.py). On CPUs
two parts run between graphs: the drawing of dropout masks by numpy, and `attention: cpu`
(torch_attention.py), which is one autograd node with in-place operations that torch.compile
refuses. That node is faster than a compiled one, so the feed-forward layers and norms are compiled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from txl_dist.config.run_config import RunConfig
from txl_dist.model.attention import choose_implementation
from txl_dist.model.dropout import Dropout, LaneDropoutMasks
from txl_dist.model.transformer_xl import Layer, TransformerXL
from txl_dist.runtime.device import autocast
from txl_dist.runtime.world import World
from txl_dist.training.cuda_graphs import record_layers

VECTOR_BYTES = 16
"""Size of the largest load instruction of a GPU, whose address must be a multiple of it."""


def compile_layers(
    model: TransformerXL, config: RunConfig, world: World, *, lanes: Sequence[int]
) -> None:
    """Compile the layers for micro-batches of `lanes`, which takes a minute or more.

    Call before DeepSpeed takes over the model: until the first step, a stop request ends the
    process immediately, and no rank waits in a collective. On CPUs torch needs a C++ compiler.
    """
    model.to(world.device)
    compile_model(model, world.device)
    _run_once(model, config, world.device, lanes)
    if records_graphs(config, world.device):
        record_layers(model, world.device)


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


def _run_once(
    model: TransformerXL, config: RunConfig, device: torch.device, lanes: Sequence[int]
) -> None:
    """A forward and backward of zeros, with the shapes and the precision of training."""
    shape = (len(lanes), config.data.tgt_len)
    # The types of training, or the first step would compile again.
    token_BT = torch.zeros(shape, dtype=torch.int64, device=device)
    age_BT = torch.zeros(shape, dtype=torch.int32, device=device)
    memory = model.empty_memory(len(lanes))
    masks = LaneDropoutMasks(seed=config.seed, step=0, lanes=lanes)
    with _at_any_address(list(model.parameters())):
        # Compiled code is for this state of the cache, too; it is off in recordings.
        with autocast(config.precision, device, cache_enabled=not records_graphs(config, device)):
            segments = config.training.backprop_segments
            nats_BT, _ = model(token_BT, token_BT, age_BT, memory, masks, segments)
        nats_BT.sum().backward()
    model.zero_grad(set_to_none=True)


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
