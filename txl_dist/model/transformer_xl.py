"""Transformer-XL: a language model whose layers attend to a memory of the preceding tokens.

    x_0     = table(tokens)
    x_(l+1) = layer_l(x_l, memory_l)       memory_l: x_l of the previous mem_len tokens, no gradient
    nats    = softmax(x_L, targets)

A layer is attention and feed-forward, each with a norm and a residual:

    post-norm (the paper)    x = norm(x + f(x))
    pre-norm (pre_lnorm)     x = x + f(norm(x)), where attention also normalises the memory

Every model takes vectors x_0 in place of ids; one without a vocabulary
takes nothing else, and has no softmax.

The model has no state: `forward` takes the memory and returns the next one. The data decides with
`age` which tokens a token may see (visibility.py). Source: Dai et al. 2019, arXiv:1901.02860.
"""

from collections.abc import Callable, Iterable, Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from txl_dist.model.attention import (
    Attention,
    AttentionWeightsCallback,
    SegmentContext,
    choose_implementation,
)
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import DeviceDropoutMasks, Dropout, DropoutMasks, on_device
from txl_dist.model.encodings import encoding_class
from txl_dist.model.layer_parts import FeedForward, RmsNorm, new_norm
from txl_dist.model.memory import SequenceState, memory_kind
from txl_dist.model.visibility import Visibility, check_segment, check_targets
from txl_dist.model.vocabulary import AdaptiveEmbedding, AdaptiveSoftmax

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, H heads, K d_head


class Layer(nn.Module):
    """forward(x_BTD, memory, context) -> the next layer's input [B, T, D].

    `memory` is what `SequenceState.past` returns; see `Attention`.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        self.attention = Attention(config, layer)
        self.attention_norm = new_norm(config)
        self.attention_dropout = Dropout(config.dropout, layer=layer, place="attention")
        self.feed_forward = FeedForward(config, layer)
        self.feed_forward_norm = new_norm(config)
        self.feed_forward_dropout = Dropout(config.dropout, layer=layer, place="feed-forward")

    def forward(self, x_BTD: Tensor, memory: Any, context: SegmentContext) -> Tensor:
        masks = context.dropout_masks
        if self.pre_lnorm:
            norm = self.attention_norm
            # The memory holds inputs from before the norm; a cache holds keys computed after it.
            gain_D = None
            if isinstance(memory, Tensor) and isinstance(norm, RmsNorm):
                memory, gain_D = norm(memory, gains_apart=True)
            elif isinstance(memory, Tensor):
                memory = norm(memory)
            mixed_BTD = self.attention(norm(x_BTD), memory, context, gain_D)
            x_BTD = x_BTD + self.attention_dropout(mixed_BTD, masks)
            out_BTD = self.feed_forward(self.feed_forward_norm(x_BTD), masks)
            return x_BTD + self.feed_forward_dropout(out_BTD, masks)
        mixed_BTD = self.attention_dropout(self.attention(x_BTD, memory, context), masks)
        x_BTD = self.attention_norm(x_BTD + mixed_BTD)
        out_BTD = self.feed_forward_dropout(self.feed_forward(x_BTD, masks), masks)
        out: Tensor = self.feed_forward_norm(x_BTD + out_BTD)
        return out


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
        if config.vocab_size == 0:
            raise ValueError("ModelConfig.vocab_size must be set to build a model")
        self.config = config
        self.recompute_layers = recompute_layers
        self.compute_layer = _compute_layer
        """Runs a layer if gradients are enabled. `training/compilation.py` compiles it."""
        self.recorded_layers: Callable[..., list[Tensor]] | None = None
        """Takes the place of `run_layers` (training/compilation.py)."""
        self.encoding = encoding_class(config)
        if config.vocab_size is not None:
            self.table = AdaptiveEmbedding(config)
        if config.shares_biases:
            heads = (config.n_head, config.d_head)
            self.content_bias_HK = nn.Parameter(torch.empty(heads))  # u of all layers
            self.distance_bias_HK = nn.Parameter(torch.empty(heads))  # v of all layers
        self.added_tokens: Any = memory_kind(config).added_tokens()
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.n_layer))
        if config.final_norm:
            self.final_norm = new_norm(config)
        if config.vocab_size is not None:
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
        num_segments: int = 1,
    ) -> tuple[Tensor, SequenceState]:
        """Score a segment. Where `target_BT` is IGNORED (-1), the nats are 0.

        `num_segments`: read it as so many segments of equal length; gradients pass through the
        memory from one to the next.

        Raises ValueError for shapes that do not fit each other, and on CPUs for ids outside the
        vocabulary and negative ages.
        """
        check_targets(self.config, target_BT, input_BT)
        if num_segments == 1:
            hidden_BTD, memory = self.hidden(input_BT, age_BT, memory, dropout_masks)
            return self.softmax(hidden_BTD, target_BT, self.table), memory
        if input_BT.shape[1] % num_segments:
            raise ValueError(f"{input_BT.shape[1]} tokens are not {num_segments} equal segments")
        nats = []
        parts = (x.chunk(num_segments, dim=1) for x in (input_BT, target_BT, age_BT))
        for number, (part_BT, part_target_BT, part_age_BT) in enumerate(zip(*parts, strict=True)):
            masks = dropout_masks and dropout_masks.of_segment(number, num_segments)
            hidden_BTD, memory = self.hidden(
                part_BT, part_age_BT, memory, masks, keeps_graph=number + 1 < num_segments
            )
            nats.append(self.softmax(hidden_BTD, part_target_BT, self.table))
        return torch.cat(nats, dim=1), memory

    def hidden(
        self,
        input_BT: Tensor,
        age_BT: Tensor,
        memory: SequenceState,
        dropout_masks: DropoutMasks | None = None,
        on_attention_weights: AttentionWeightsCallback | None = None,
        *,
        keeps_graph: bool = False,
    ) -> tuple[Tensor, SequenceState]:
        """The model's output [B, T, D], and the memory for the next segment.

        `input_BT`: ids, or vectors [B, T, D] in place of those of the table. `keeps_graph`:
        gradients of the next segment pass through the memory into this one.
        """
        check_segment(self.config, input_BT, age_BT, memory)
        is_trained = self.training and memory.is_trainable
        if is_trained and dropout_masks is None and max(self.config.dropout, self.config.dropatt):
            dropout_masks = DeviceDropoutMasks()
        if dropout_masks is not None:
            dropout_masks = on_device(dropout_masks, self.weight.device)
        x_BTD = self.embed(input_BT)
        if torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(memory.residual_dtype or x_BTD.dtype)
        x_BTD = self.embedding_dropout(x_BTD, dropout_masks)
        read_age_BT = age_BT
        if self.added_tokens is not None:
            x_BTD, read_age_BT = self.added_tokens(x_BTD, age_BT, memory)
        # One at a time: a memory of another dtype or device is copied for its layer.
        pasts = (memory.past(number, x_BTD) for number in range(len(self.layers)))
        # Built once for all layers of a memory length, including the mask that follows from the
        # ages.
        context_of = {
            num_past: self._segment_context(
                x_BTD, memory.reach(read_age_BT), num_past, dropout_masks, on_attention_weights
            )
            for num_past in dict.fromkeys(memory.num_pasts)
        }
        contexts = [context_of[num_past] for num_past in memory.num_pasts]
        run_layers = self.recorded_layers or self.run_layers
        hidden = run_layers(x_BTD, pasts, contexts)
        x_BTD = hidden[-1]
        # Gradients stop at the memory (section 3.2 of the paper), unless the caller continues.
        with torch.set_grad_enabled(keeps_graph and torch.is_grad_enabled()):
            memory = memory.after(hidden, age_BT)
        if self.added_tokens is not None:
            x_BTD = self.added_tokens.removed(x_BTD)
        return self.output_dropout(self.output(x_BTD), dropout_masks), memory

    def run_layers(
        self,
        x_BTD: Tensor,
        pasts: Iterable[Any],
        contexts: Sequence[SegmentContext],
        *,
        start: int = 0,
    ) -> list[Tensor]:
        """The input of each layer from `start` on, as many as `pasts`, and the last output."""
        hidden = [x_BTD]
        for number, (past, context) in enumerate(zip(pasts, contexts, strict=True), start):
            hidden.append(self._run_layer(self.layers[number], hidden[-1], past, context))
        return hidden

    def embed(self, input_BT: Tensor) -> Tensor:
        """x_0 before dropout, [B, T, D]."""
        # An encoder under autocast gives bf16.
        is_vectors = input_BT.is_floating_point()
        x_BTD = input_BT.to(self.weight.dtype) if is_vectors else self.table(input_BT)
        # Only absolute positions change the input; other encodings act on the scores.
        return self.encoding.add_to_input(self.config, x_BTD)

    def output(self, x_BTD: Tensor) -> Tensor:
        """The model's output before dropout, from that of the last layer."""
        return self.final_norm(x_BTD) if self.config.final_norm else x_BTD

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
        with_dropout = dropout_masks is not None and config.dropatt > 0
        implementation = choose_implementation(config, x_BTD.device, with_dropout=with_dropout)
        needs_mask = not implementation.needs_triton or on_attention_weights is not None
        return SegmentContext(
            distances=self.encoding.prepare(
                config, num_keys, x_BTD, lambda x: self.distance_dropout(x, dropout_masks)
            ),
            biases_HK=self.shared_biases,
            attention=resolve_name(implementation.function),
            is_triton=implementation.needs_triton,
            visibility=Visibility.of(
                age_BT,
                num_past=num_past,
                same_length=config.same_length,
                num_groups=config.n_head // config.num_kv_heads,
                mask_dtype=x_BTD.dtype if needs_mask else None,
            ),
            dropout_masks=dropout_masks,
            on_attention_weights=on_attention_weights,
        )

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits of the next token, [B, T, V]. Raises ValueError for a model of vectors."""
        if self.config.vocab_size is None:
            raise ValueError("a model with vocab_size=null has no logits: it has no vocabulary")
        return self.softmax.logits(hidden_BTD, self.table)

    @property
    def shared_biases(self) -> tuple[nn.Parameter, nn.Parameter] | None:
        """u and v, if all layers share them."""
        is_shared = self.config.shares_biases
        return (self.content_bias_HK, self.distance_bias_HK) if is_shared else None

    @property
    def weight(self) -> Tensor:
        """A weight that every model has, for its dtype and device."""
        layer: Any = self.layers[0]
        weight: Tensor = layer.attention.query.weight
        return weight

    def empty_memory(self, num_lanes: int, *, dtype: torch.dtype | None = None) -> SequenceState:
        """The memory at the start of `num_lanes` streams, with the parameters' dtype and device.

        `dtype`: another one to store it in.
        """
        # Like a weight, so that `model.to(...)` or `.double()` also applies to new memories.
        weight = self.weight
        return memory_kind(self.config).empty(
            num_lanes, dtype=dtype or weight.dtype, device=weight.device
        )

    def inference_state(self, num_lanes: int, *, max_tokens: int | None = None) -> SequenceState:
        """The same in the fastest way for constant weights and disabled gradients.

        `max_tokens`: no segment has more tokens before it than this, so no more are kept.
        """
        weight = self.weight
        return memory_kind(self.config).for_inference(
            num_lanes, max_tokens=max_tokens, dtype=weight.dtype, device=weight.device
        )


def _compute_layer(layer: nn.Module, x_BTD: Tensor, past: Any, context: SegmentContext) -> Tensor:
    output_BTD: Tensor = layer(x_BTD, past, context)
    return output_BTD


QK_GAIN = 15.4**0.5
"""Of a d_head of 1. So scores are at most 15.4 at first, for any d_head: the product of a query and
a key of length sqrt(K), times both gains, over sqrt(K) (docs/experiments/model.md)."""


def initialise(model: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill all parameters in place, as a function of the config and `seed`.

        matrices, u and v                          normal(0, init_std)
        projections of embedding and softmax       normal(0, proj_init_std)
        gains of LayerNorm                         normal(1, init_std)
        gains of RMS norms                         1; of queries and keys, `QK_GAIN`
        biases                                     0

    as in the paper's training script, which has no RMS norms. One generator draws all parameters in
    their order, so every rank has the same weights without a broadcast.
    """
    # A separate generator on the CPU: the weights depend neither on global state nor on the device.
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "projections." in name:
                parameter.normal_(0.0, config.proj_init_std, generator=generator)
            elif name.endswith("norm.weight") and config.norm == "layernorm":
                parameter.normal_(1.0, config.init_std, generator=generator)
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("gain_K"):
                parameter.fill_(QK_GAIN * config.d_head**-0.25)
            elif name.endswith((".bias", "cluster_bias")):
                parameter.zero_()
            else:
                parameter.normal_(0.0, config.init_std, generator=generator)
