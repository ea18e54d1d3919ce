"""Transformer-XL: a language model whose layers attend to a memory of the preceding tokens.

    x_0     = table(tokens)
    x_(l+1) = layer_l(x_l, memory_l)       memory_l: x_l of the previous mem_len tokens, no gradient
    nats    = softmax(x_L, targets)

The model has no state: `forward` takes the memory and returns the next one. The data decides with
`age` which tokens a token may see (visibility.py). Source: Dai et al. 2019, arXiv:1901.02860.
"""

from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from txl_dist.model.adaptive_softmax import AdaptiveSoftmax
from txl_dist.model.attention import AttentionWeightsCallback, SegmentContext, choose_form
from txl_dist.model.config import ModelConfig
from txl_dist.model.device_dropout import DeviceDropoutMasks
from txl_dist.model.dropout import Dropout, DropoutMasks
from txl_dist.model.embedding import AdaptiveEmbedding
from txl_dist.model.encodings import encoding_class
from txl_dist.model.initialisation import initialise
from txl_dist.model.kv_cache import KVCache
from txl_dist.model.layers import Layer
from txl_dist.model.memory import Memory, read_as
from txl_dist.model.segment_checks import check_segment, check_targets
from txl_dist.model.visibility import Visibility

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys, D d_model, H heads, K d_head


class TransformerXL(nn.Module):
    """forward(input_BT, target_BT, age_BT, memory, dropout_masks) -> (nats_BT, next memory).

    `memory` may also be a KVCache, if weights are constant and gradients are disabled. `forward`
    changes a KVCache in place and returns the same one; a Memory is not changed.

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
        memory: Memory | KVCache,
        dropout_masks: DropoutMasks | None = None,
    ) -> tuple[Tensor, Memory | KVCache]:
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
        memory: Memory | KVCache,
        dropout_masks: DropoutMasks | None = None,
        on_attention_weights: AttentionWeightsCallback | None = None,
    ) -> tuple[Tensor, Memory | KVCache]:
        """The last layer's output [B, T, D], and the memory for the next segment."""
        check_segment(self.config, input_BT, age_BT, memory)
        is_trained = self.training and isinstance(memory, Memory)
        if is_trained and dropout_masks is None and max(self.config.dropout, self.config.dropatt):
            dropout_masks = DeviceDropoutMasks.random()
        x_BTD = self.table(input_BT)
        # Only absolute positions change the input; other encodings act on the scores.
        x_BTD = self.encoding.add_to_input(self.config, x_BTD)
        x_BTD = self.embedding_dropout(x_BTD, dropout_masks)
        # Built once for all layers, including the mask that follows from the ages.
        context = self._segment_context(
            x_BTD, age_BT, memory.mem_len, dropout_masks, on_attention_weights
        )
        inputs = []  # of each layer: the next memory
        for layer, layer_memory in zip(self.layers, memory.layers, strict=True):
            inputs.append(x_BTD)
            x_BTD = self._run_layer(layer, x_BTD, layer_memory, context)
        return self.output_dropout(x_BTD, dropout_masks), memory.after(inputs)

    def _run_layer(
        self,
        layer: nn.Module,
        x_BTD: Tensor,
        memory: Any,
        context: SegmentContext,
    ) -> Tensor:
        memory = read_as(memory, x_BTD) if isinstance(memory, Tensor) else memory
        if not torch.is_grad_enabled():
            return layer(x_BTD, memory, context)
        if not self.recompute_layers:
            return self.compute_layer(layer, x_BTD, memory, context)
        # No random state to restore: dropout masks are a function of their place (dropout.py).
        # No early stop: it leaves forward by an exception, so hooks that release the layer's
        # gathered weights (ZeRO stage 3) would not run.
        output_BTD: Tensor = checkpoint(
            self.compute_layer, layer, x_BTD, memory, context,
            use_reentrant=False, preserve_rng_state=False, early_stop=False,
        )  # fmt: skip
        return output_BTD

    def _segment_context(
        self,
        x_BTD: Tensor,
        age_BT: Tensor,
        mem_len: int,
        dropout_masks: DropoutMasks | None,
        on_attention_weights: AttentionWeightsCallback | None,
    ) -> SegmentContext:
        config, num_keys = self.config, mem_len + x_BTD.shape[1]
        form = choose_form(
            config.attention,
            device=x_BTD.device,
            with_dropout=dropout_masks is not None and config.dropatt > 0,
            d_head=config.d_head,
        )
        needs_mask = not form.masks_by_reach or on_attention_weights is not None
        return SegmentContext(
            distances=self.encoding.prepare(
                config, num_keys, x_BTD, lambda x: self.distance_dropout(x, dropout_masks)
            ),
            biases_HK=(
                (self.content_bias_HK, self.distance_bias_HK) if config.shares_biases else None
            ),
            attention=resolve_name(form.implementation),
            reads_keep_bits=form.reads_keep_bits,
            visibility=Visibility.of(
                age_BT,
                mem_len=mem_len,
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
    ) -> Memory:
        """The memory at the start of `num_lanes` streams, with the parameters' dtype and device.

        `dtype`: another one to store it in. `on_host`: for a model on a GPU, in pinned memory of
        the host.
        """
        # Like a weight, so that `model.to(...)` or `.double()` also applies to new memories.
        weight, config = self.table.weights[0], self.config
        pin = on_host and weight.device.type == "cuda"
        return Memory.empty(
            n_layer=config.n_layer,
            num_lanes=num_lanes,
            mem_len=config.mem_len,
            d_model=config.d_model,
            dtype=dtype or weight.dtype,
            device="cpu" if on_host else weight.device,
            pin=pin,
        )

    def empty_kv_cache(self, num_lanes: int, *, max_memory: int | None = None) -> KVCache:
        """A cache to pass instead of a memory if weights are constant and gradients disabled.

        `max_memory`: no segment has more tokens before it than this, so no more are kept.
        """
        config, mem_len = self.config, self.config.mem_len
        # Under same_length, mem_len also limits the attention span.
        if max_memory is not None and not config.same_length:
            mem_len = min(mem_len, max(0, max_memory))
        return KVCache.empty(
            n_layer=config.n_layer,
            num_lanes=num_lanes,
            mem_len=mem_len,
            n_head=config.n_head,
            d_head=config.d_head,
        )


def _compute_layer(layer: nn.Module, x_BTD: Tensor, memory: Any, context: SegmentContext) -> Tensor:
    output_BTD: Tensor = layer(x_BTD, memory, context)
    return output_BTD
