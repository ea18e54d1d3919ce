"""Transformer-XL: a language model whose layers attend to a memory of the preceding tokens.

    x_0     = table(tokens)
    x_(l+1) = layer_l(x_l, memory_l)       memory_l: x_l of the previous mem_len tokens, no gradient
    nats    = softmax(x_L, targets)

A layer is attention and feed-forward, each with a residual and a LayerNorm:

    post-norm (the paper)    x = norm(x + f(x))
    pre-norm (pre_lnorm)     x = x + f(norm(x)), where attention also normalises the memory

The model has no state: `forward` takes the memory and returns the next one. The data decides with
`age` which tokens a token may see (visibility.py). Source: Dai et al. 2019, arXiv:1901.02860.
"""

from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from txl_dist.model.attention import (
    Attention,
    AttentionWeightsCallback,
    SegmentContext,
    choose_implementation,
)
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import DeviceDropoutMasks, Dropout, DropoutMasks
from txl_dist.model.encodings import encoding_class
from txl_dist.model.memory import SequenceState, memory_kind
from txl_dist.model.visibility import Visibility, check_segment, check_targets
from txl_dist.model.vocabulary import AdaptiveEmbedding, AdaptiveSoftmax

# Shapes: B lanes, T segment tokens, N = B T, D d_model, I d_inner


class FeedForward(nn.Module):
    """forward(x_BTD, dropout_masks) -> out_BTD, without the residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_inner)
        self.down = nn.Linear(config.d_inner, config.d_model)
        self.inner_dropout = Dropout(config.dropout, layer=layer, place="inner")

    def forward(self, x_BTD: Tensor, dropout_masks: DropoutMasks | None) -> Tensor:
        # Flatten to 2-D: nn.Linear on 3-D input returns a view, which the in-place ReLU would
        # force autograd to copy.
        inner_NI = in_place_relu(self.up(x_BTD.flatten(0, 1)))
        inner_BTI = inner_NI.unflatten(0, x_BTD.shape[:2])
        return self.down(self.inner_dropout(inner_BTI, dropout_masks))


class Layer(nn.Module):
    """forward(x_BTD, past, context) -> the next layer's input [B, T, D].

    `past` is what `SequenceState.past` returns; see `Attention`.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        self.memory_reader = memory_kind(config).reader(layer)
        self.attention = Attention(config, layer)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention_dropout = Dropout(config.dropout, layer=layer, place="attention")
        self.feed_forward = FeedForward(config, layer)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_dropout = Dropout(config.dropout, layer=layer, place="feed-forward")

    def forward(self, x_BTD: Tensor, past: Any, context: SegmentContext) -> Tensor:
        masks, memory = context.dropout_masks, past
        if self.memory_reader is not None:
            x_BTD, memory = self.memory_reader(x_BTD, past, context)
        if self.pre_lnorm:
            norm = self.attention_norm
            # The memory holds inputs from before the norm; a cache holds keys computed after it.
            memory = norm(memory) if isinstance(memory, Tensor) else memory
            mixed_BTD = self.attention(norm(x_BTD), memory, context)
            x_BTD = x_BTD + self.attention_dropout(mixed_BTD, masks)
            out_BTD = self.feed_forward(self.feed_forward_norm(x_BTD), masks)
            return x_BTD + self.feed_forward_dropout(out_BTD, masks)
        mixed_BTD = self.attention(x_BTD, memory, context)
        x_BTD = self.attention_norm(x_BTD + self.attention_dropout(mixed_BTD, masks))
        out_BTD = self.feed_forward(x_BTD, masks)
        return self.feed_forward_norm(x_BTD + self.feed_forward_dropout(out_BTD, masks))


# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, H heads, K d_head


class TransformerXL(nn.Module):
    """forward(input_BT, target_BT, age_BT, memory, dropout_masks) -> (nats_BT, next memory).

    `memory` is a state of `empty_memory` or, if weights are constant and gradients are disabled, of
    `inference_state`, which `forward` may change in place. What they hold: memory/__init__.py.

    Dropout: `dropout_masks`, or if they are None and the model is in training mode, new masks that
    follow `torch.manual_seed`. A segment with a KVCache has no dropout then, as it is not trained.

    `recompute_layers`: backward computes the activations inside each layer again, so forward stores
    only the layers' inputs (activation checkpointing). Results are the same bit for bit.
    """

    def __init__(
        self, config: ModelConfig, *, seed: int = 0, recompute_layers: bool = False
    ) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError("ModelConfig.vocab_size must be set to build a model")
        self.config = config
        self.recompute_layers = recompute_layers
        self.compute_layer = _compute_layer
        """Runs a layer if gradients are enabled. `training/compilation.py` compiles it."""
        self.encoding = encoding_class(config)
        self.table = AdaptiveEmbedding(config)
        if config.shares_biases:
            heads = (config.n_head, config.d_head)
            self.content_bias_HK = nn.Parameter(torch.empty(heads))  # u of all layers
            self.distance_bias_HK = nn.Parameter(torch.empty(heads))  # v of all layers
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.n_layer))
        self.softmax = AdaptiveSoftmax(config)
        self.embedding_dropout = Dropout(config.dropout, layer=0, place="embedding")
        # All lanes share the encoded distances, so they also share the dropout mask.
        self.distance_dropout = Dropout(config.dropout, layer=0, place="distances", by_lane=False)
        self.output_dropout = Dropout(config.dropout, layer=config.n_layer, place="output")
        initialise(self, config, seed=seed)

    def forward(
        self,
        input_BT: Tensor,
        target_BT: Tensor,
        age_BT: Tensor,
        memory: SequenceState,
        dropout_masks: DropoutMasks | None = None,
    ) -> tuple[Tensor, SequenceState]:
        """Score a segment. Where `target_BT` is IGNORED (-1), the nats are 0.

        Raises ValueError for shapes that do not fit each other, and on CPUs for ids outside the
        vocabulary and negative ages.
        """
        check_targets(self.config, target_BT, input_BT)
        hidden_BTD, memory = self.hidden(input_BT, age_BT, memory, dropout_masks)
        return self.softmax(hidden_BTD, target_BT, self.table), memory

    def hidden(
        self,
        input_BT: Tensor,
        age_BT: Tensor,
        memory: SequenceState,
        dropout_masks: DropoutMasks | None = None,
        on_attention_weights: AttentionWeightsCallback | None = None,
    ) -> tuple[Tensor, SequenceState]:
        """The last layer's output [B, T, D], and the memory for the next segment."""
        check_segment(self.config, input_BT, age_BT, memory)
        is_trained = self.training and memory.is_trainable
        if is_trained and dropout_masks is None and max(self.config.dropout, self.config.dropatt):
            dropout_masks = DeviceDropoutMasks.random()
        x_BTD = self.table(input_BT)
        # Only absolute positions change the input; other encodings act on the scores.
        x_BTD = self.encoding.add_to_input(self.config, x_BTD)
        x_BTD = self.embedding_dropout(x_BTD, dropout_masks)
        # Built once for all layers, including the mask that follows from the ages.
        context = self._segment_context(
            x_BTD, age_BT, memory.num_past, dropout_masks, on_attention_weights
        )
        hidden = [x_BTD]  # the input of each layer, and the last output: the next memory
        for number, layer in enumerate(self.layers):
            x_BTD = self._run_layer(layer, x_BTD, memory.past(number, x_BTD), context)
            hidden.append(x_BTD)
        return self.output_dropout(x_BTD, dropout_masks), memory.after(hidden, age_BT)

    def _run_layer(
        self,
        layer: nn.Module,
        x_BTD: Tensor,
        past: Any,
        context: SegmentContext,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return layer(x_BTD, past, context)
        if not self.recompute_layers:
            return self.compute_layer(layer, x_BTD, past, context)
        # No random state to restore: dropout masks are a function of their place (dropout.py).
        # No early stop: it leaves forward by an exception, so hooks that release the layer's
        # gathered weights (ZeRO stage 3) would not run.
        output_BTD: Tensor = checkpoint(
            self.compute_layer, layer, x_BTD, past, context,
            use_reentrant=False, preserve_rng_state=False, early_stop=False,
        )  # fmt: skip
        return output_BTD

    def _segment_context(
        self,
        x_BTD: Tensor,
        age_BT: Tensor,
        num_past: int,
        dropout_masks: DropoutMasks | None,
        on_attention_weights: AttentionWeightsCallback | None,
    ) -> SegmentContext:
        config, num_keys = self.config, num_past + x_BTD.shape[1]
        implementation = choose_implementation(
            config.attention,
            device=x_BTD.device,
            with_dropout=dropout_masks is not None and config.dropatt > 0,
            d_head=config.d_head,
        )
        needs_mask = not implementation.masks_by_reach or on_attention_weights is not None
        return SegmentContext(
            distances=self.encoding.prepare(
                config, num_keys, x_BTD, lambda x: self.distance_dropout(x, dropout_masks)
            ),
            biases_HK=(
                (self.content_bias_HK, self.distance_bias_HK) if config.shares_biases else None
            ),
            attention=resolve_name(implementation.function),
            reads_keep_bits=implementation.reads_keep_bits,
            visibility=Visibility.of(
                age_BT,
                num_past=num_past,
                same_length=config.same_length,
                mask_dtype=x_BTD.dtype if needs_mask else None,
            ),
            dropout_masks=dropout_masks,
            on_attention_weights=on_attention_weights,
        )

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits of the next token, [B, T, V]."""
        return self.softmax.logits(hidden_BTD, self.table)

    def empty_memory(
        self, num_lanes: int, *, dtype: torch.dtype | None = None, on_host: bool = False
    ) -> SequenceState:
        """The memory at the start of `num_lanes` streams, with the parameters' dtype and device.

        `dtype`: another one to store it in. `on_host`: for a model on a GPU, in pinned RAM of the
        host.
        """
        # Like a weight, so that `model.to(...)` or `.double()` also applies to new memories.
        weight = self.table.weights[0]
        return memory_kind(self.config).empty(
            num_lanes,
            dtype=dtype or weight.dtype,
            device="cpu" if on_host else weight.device,
            pin=on_host and weight.device.type == "cuda",
        )

    def inference_state(self, num_lanes: int, *, max_tokens: int | None = None) -> SequenceState:
        """The same in the fastest way for constant weights and disabled gradients.

        `max_tokens`: no segment has more tokens before it than this, so no more are kept.
        """
        weight = self.table.weights[0]
        return memory_kind(self.config).for_inference(
            num_lanes, max_tokens=max_tokens, dtype=weight.dtype, device=weight.device
        )


def _compute_layer(layer: nn.Module, x_BTD: Tensor, past: Any, context: SegmentContext) -> Tensor:
    output_BTD: Tensor = layer(x_BTD, past, context)
    return output_BTD


def initialise(model: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill all parameters in place, as a function of the config and `seed`.

        matrices, u and v                          normal(0, init_std)
        projections of embedding and softmax       normal(0, proj_init_std)
        gains of LayerNorm                         normal(1, init_std)
        biases                                     0

    as in the paper's training script. One generator draws all parameters in their order, so every
    rank has the same weights without a broadcast.
    """
    # A separate generator on the CPU: the weights depend neither on global state nor on the device.
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "projections." in name:
                parameter.normal_(0.0, config.proj_init_std, generator=generator)
            elif name.endswith("norm.weight"):
                parameter.normal_(1.0, config.init_std, generator=generator)
            elif name.endswith((".bias", "cluster_bias")):
                parameter.zero_()
            else:
                parameter.normal_(0.0, config.init_std, generator=generator)


def in_place_relu(x: Tensor) -> Tensor:
    """ReLU that overwrites `x`, and in backward the gradient of its output.

    `x` must be the output of a product that nothing else reads. A forward hook on that product sees
    the values after the ReLU, and must not use its gradient.
    """
    return _InPlaceRelu.apply(x)


class _InPlaceRelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.relu_())
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        (gradient,) = gradients  # safe to overwrite: the next product computed it for this node
        return torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=gradient)
