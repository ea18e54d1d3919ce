"""The parameter names of the paper's code, and what they are called here.

The original keeps one matrix for queries, keys and values and repeats tied tensors under two names.
Serves the golden tests and imports of foreign weights; works on any tensors, gradients included.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from txl_dist.model.config import ModelConfig

_LAYER_NAMES = {
    "dec_attn.o_net.weight": "attention.out.weight",
    "dec_attn.r_net.weight": "attention.distance.weight",
    "dec_attn.layer_norm.weight": "attention_norm.weight",
    "dec_attn.layer_norm.bias": "attention_norm.bias",
    "pos_ff.CoreNet.0.weight": "feed_forward.up.weight",
    "pos_ff.CoreNet.0.bias": "feed_forward.up.bias",
    "pos_ff.CoreNet.3.weight": "feed_forward.down.weight",
    "pos_ff.CoreNet.3.bias": "feed_forward.down.bias",
    "pos_ff.layer_norm.weight": "feed_forward_norm.weight",
    "pos_ff.layer_norm.bias": "feed_forward_norm.bias",
}
_MODEL_NAMES = {
    "r_w_bias": "content_bias_HK",
    "r_r_bias": "distance_bias_HK",
    "word_emb.emb_layers.0.weight": "table.weight",
    "word_emb.emb_projs.0": "table.projection",
    "crit.out_layers.0.weight": "softmax.weight",
    "crit.out_layers.0.bias": "softmax.bias",
    "crit.out_projs.0": "softmax.projection",
}


def original_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Original name -> our names, whose tensors stand one below the other in the original's."""
    names: dict[str, tuple[str, ...]] = {
        original: (ours,) for original, ours in _MODEL_NAMES.items()
    }
    if config.tie_weight:
        del names["crit.out_layers.0.weight"]
    if not config.has_projection:
        del names["word_emb.emb_projs.0"]
    if not config.has_projection or config.tie_projection:
        del names["crit.out_projs.0"]
    for layer in range(config.n_layer):
        here = f"layers.{layer}."
        names |= {here + original: (here + ours,) for original, ours in _LAYER_NAMES.items()}
        names[here + "dec_attn.qkv_net.weight"] = (
            here + "attention.query.weight",
            here + "attention.key_value.weight",
        )
    return names


def from_original(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state dict from the original's; what is tied is read once."""
    width = config.n_head * config.d_head
    ours: dict[str, Tensor] = {}
    for original, names in original_names(config).items():
        tensor = tensors[original]
        pieces = tensor.split([width, 2 * width]) if len(names) > 1 else (tensor,)
        ours |= dict(zip(names, pieces, strict=True))
    return ours


def to_original(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The other way: tensors by our names (weights or gradients) under the original's names."""
    return {
        original: torch.cat([tensors[name] for name in names])
        for original, names in original_names(config).items()
    }
