"""Builds what computes: the step, with model, engine and memory, and evaluation on the ranks.

`training.compile`: the layers of the model are compiled by torch.compile, before the first step.
Only layers are compiled, and all of them share one function: the tables, the softmax and the memory
are few operations of large tensors. Evaluation runs uncompiled, because its shapes vary.

On GPUs with masks by lane a layer is one graph. Otherwise two parts run between graphs: the drawing
of dropout masks, and `attention: cpu` (model/attention/cpu.py), which is one autograd node with
in-place operations that torch.compile refuses. On CPUs that node is faster than a compiled one, so
there the feed-forward layers and norms are compiled.
"""

import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.evaluation.job import EvaluationSettings
from txl_dist.evaluation.result import evaluate_on_ranks, plan_evaluation
from txl_dist.evaluation.scoring import Scorer
from txl_dist.model.attention import choose_implementation
from txl_dist.model.config import ATTENTION_IMPLEMENTATIONS, ModelConfig
from txl_dist.model.devices import has_triton, triton_unavailable_reason
from txl_dist.model.dropout import DeviceDropoutMasks, Dropout, DropoutMasks, LaneDropoutMasks
from txl_dist.model.layer import Layer
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import TORCH_DTYPE, autocast
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.world import World
from txl_dist.training.begin import RankContext
from txl_dist.training.engine import Engine, create_engine
from txl_dist.training.scores import Evaluate, Score
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep


def build_step(rank: RankContext) -> TrainStep:
    """The model, its engine, and the memory of this rank's lanes. Collective."""
    config, data, world = rank.config, rank.data, rank.world
    fault_point("engine")
    num_rows = data.plan.rows_per_rank(world.num_ranks)
    micro_batch_rows = min(num_rows, config.training.micro_batch_lanes or num_rows)
    # Equal on all ranks: at stage 3 every forward and backward is collective, so a rank with fewer
    # lanes computes padding rows.
    shape = {
        "num_micro_batches": math.ceil(num_rows / micro_batch_rows),
        "micro_batch_rows": micro_batch_rows,
    }
    model = TransformerXL(
        data.model_config,
        seed=config.seed,
        recompute_layers=config.training.activation_checkpointing,
    )
    lanes = data.plan.lanes_of_rank(world.rank, world.num_ranks)
    _require_attention(data.model_config, world.device)
    if config.training.compile:
        compile_layers(model, config, world, lanes=range(micro_batch_rows))
    engine = create_engine(model, config, world, **shape)
    log.info("the model is built")
    return TrainStep(
        engine,
        world,
        lanes=lanes,
        seed=config.seed,
        byte_counts_V=data.tokenizer.token_bytes(),
        memory_dtype=TORCH_DTYPE[config.training.memory_dtype],
        memory_on_host=config.training.memory_device == "cpu",
        dropout_rng=config.training.dropout_rng,
        num_segments=config.training.backprop_segments,
        **shape,
    )


def _require_attention(config: ModelConfig, device: torch.device) -> None:
    """Evaluation and generation replace one that cannot run; training was asked for it."""
    facts = ATTENTION_IMPLEMENTATIONS.get(config.attention)
    reason = triton_unavailable_reason(device)
    if facts is None or not facts.needs_triton or not reason:
        return
    raise ConfigError(
        f"model.attention={config.attention} needs the package triton and a GPU of compute "
        f"capability 8.0 (A100) or newer, and {reason}. Set model.attention=auto, which takes it "
        "where it can run; or, to test the kernels on a CPU with a small model, set the "
        "environment variable TRITON_INTERPRET=1"
    )


def build_evaluator(rank: RankContext, engine: Engine) -> Evaluate | None:
    """A function that scores `data.evaluation` with the current weights; None if that is not done.

    If the run averages its weights, the average is scored.

    The split is opened and its chunks are planned here, once. Raises DataError if it has no target.
    """
    config, data, world = rank.config, rank.data, rank.world
    if data.evaluation is None or config.evaluation.on != "ranks":
        return None
    model = engine.model
    settings = EvaluationSettings(
        split=data.evaluation.name,
        mode="exact",
        tgt_len=config.segment_len,
        mem_len=model.config.mem_len,
        clamp_len=model.config.clamp_len,
        same_length=model.config.same_length,
        reset=config.data.reset,
        max_tokens=config.evaluation.max_tokens,
        precision=config.precision,
    )
    scorer = Scorer(
        model=model,
        source=data.evaluation.open(),
        tgt_len=settings.tgt_len,
        reset=settings.reset,
        precision=settings.precision,
        batch_chunks=config.evaluation.batch_chunks,
        byte_counts_V=torch.from_numpy(data.tokenizer.token_bytes()),
    )
    chunks = plan_evaluation(scorer.source, settings, model.config)

    score = Score(
        step=0,
        split=settings.split,
        max_tokens=settings.max_tokens,
        data_digest=data.evaluation.corpus.manifest.digest,
        nats=None,
    )

    def evaluate(state: TrainState, *, stop: object) -> Score | None:
        world.activity.name = f"evaluation of split {settings.split}"
        with engine.averaged_weights(), engine.whole_model() as whole_model:
            whole_scorer = replace(scorer, model=whole_model)
            result = evaluate_on_ranks(whole_scorer, chunks, settings, world=world, stop=stop)
        if result is None:
            return None
        facts = {"step": state.step, "tokens": state.tokens}
        return score.model_copy(update=facts).with_result(result)

    return evaluate


log = logging.getLogger(__name__)

VECTOR_BYTES = 16
"""Size of the largest load instruction of a GPU, whose address must be a multiple of it."""


def compile_layers(
    model: TransformerXL, config: RunConfig, world: World, *, lanes: Sequence[int]
) -> None:
    """Compile the layers for micro-batches of `lanes`, which takes a minute or more.

    Call before DeepSpeed takes over the model: until the first step, a stop request ends the
    process immediately, and no rank waits in a collective. Raises ConfigError without a compiler.
    """
    _require_compiler(world.device)
    model.to(world.device)
    compile_model(
        model,
        world.device,
        draws_by_kernel=config.training.dropout_rng == "lane",
        cuda_graphs=config.training.cuda_graphs,
    )
    _run_once(model, config, world.device, lanes)


def compile_model(
    model: TransformerXL, device: torch.device, *, draws_by_kernel: bool, cuda_graphs: bool = False
) -> None:
    """Let the next forward compile the layers.

    `draws_by_kernel`: dropout masks are by lane, which on GPUs with triton are operators of the
    compiled graph. `cuda_graphs`: there layers are recorded as CUDA graphs, too.
    """
    draws_by_kernel = draws_by_kernel and device.type == "cuda" and has_triton(device)
    if not _attention_can_be_compiled(model, device):
        for layer in model.layers:
            assert isinstance(layer, Layer)
            layer.attention.forward = torch.compiler.disable(  # type: ignore[method-assign]
                layer.attention.forward
            )
    for module in model.modules():
        if isinstance(module, Dropout) and not draws_by_kernel:
            # numpy or a generator of torch draws; code would be compiled again for every layer.
            for name in ("draw", "draw_bits"):
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
    options: dict[str, Any] = {}
    if cuda_graphs and draws_by_kernel:
        options["triton.cudagraphs"] = True
        _use_cuda_graphs(model)
    # One graph per memory length, and one more where the memory has a gradient.
    dynamo_config = torch._dynamo.config
    dynamo_config.recompile_limit = max(
        dynamo_config.recompile_limit, 2 * len({*model.config.mem_lens})
    )
    # dynamic=False: all segments have one shape.
    model.compute_layer = torch.compile(model.compute_layer, dynamic=False, options=options or None)


def _use_cuda_graphs(model: TransformerXL) -> None:
    """Keep nothing in the memory of the graphs, which the next micro-batch overwrites.

    The recurrent memory is a copy in any case (memory/recurrent.py).
    """
    model.before_layers = torch.compiler.cudagraph_mark_step_begin
    shared = [model.content_bias_HK, model.distance_bias_HK] if model.config.shares_biases else []
    for parameter in (*model.layers.parameters(), *shared):
        parameter.register_hook(torch.clone)  # its gradient, which may be kept for several batches


def _attention_can_be_compiled(model: TransformerXL, device: torch.device) -> bool:
    """Whether torch.compile accepts the attention that training takes on `device`."""
    config = model.config
    return choose_implementation(
        config.attention, device=device, with_dropout=config.dropatt > 0, d_head=config.d_head
    ).can_be_compiled


def _run_once(
    model: TransformerXL, config: RunConfig, device: torch.device, lanes: Sequence[int]
) -> None:
    """A forward and backward of zeros, with the shapes and the precision of training."""
    shape = (len(lanes), config.data.tgt_len)
    # The types of training, or the first step would compile again.
    token_BT = torch.zeros(shape, dtype=torch.int64, device=device)
    age_BT = torch.zeros(shape, dtype=torch.int32, device=device)
    memory = model.empty_memory(len(lanes))
    masks: DropoutMasks = LaneDropoutMasks(seed=config.seed, step=0, lanes=lanes)
    if config.training.dropout_rng == "device":
        masks = DeviceDropoutMasks(seed=config.seed)
    with _at_any_address(list(model.parameters())):
        with autocast(config.precision, device):
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


def _require_compiler(device: torch.device) -> None:
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        compiler = ""
    if shutil.which(compiler) is None:
        raise ConfigError(
            "training.compile=true needs a C++ compiler on machines without a GPU, and none was "
            "found. Install g++, name one with CXX=PATH, or set training.compile=false"
        )
