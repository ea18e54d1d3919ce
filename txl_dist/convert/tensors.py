"""Builds a model from imported tensors after checking every name, shape and value.

Tensors have the original's names (`txl_dist/model/original_weights.py`). The files are read by
`original.py`, `transformers.py` and `single_file.py`.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.original_weights import from_original, to_original
from txl_dist.model.transformer_xl import TransformerXL

_BUFFERS = ("pos_emb.inv_freq",)
"""Constants that the original saves with its parameters. This model computes them."""


def model_from_original(
    tensors: Mapping[str, object],
    config: ModelConfig,
    *,
    origin: str,
    clusters_reversed: bool,
) -> TransformerXL:
    """Build the model from tensors with the original's names.

    A tied tensor may be present under one or all of its names. Raises CheckpointError naming a
    tensor that is missing, unknown, not finite, of the wrong shape, or tied to a different one.
    """
    model = empty_model(config, origin=origin, num_tensors=len(tensors))
    expected = to_original(model.state_dict(), config)
    tied = _tied_names(config)
    parameters = {name: tensor for name, tensor in tensors.items() if name not in _BUFFERS}
    for other, name in tied.items():
        if other in parameters:  # some writers store only one of the two, not always the same
            parameters.setdefault(name, parameters[other])
            expected[other] = expected[name]
    checked = check_tensors(parameters, expected, origin=origin)
    for other, name in tied.items():
        if other in checked and not torch.equal(checked[other], checked[name]):
            raise CheckpointError(
                f"{origin}: {other} differs from {name}, but the config ties them; "
                "correct tie_weight, tie_projs or untie_r there"
            )
    return assign_weights(
        model, from_original(checked, config, clusters_reversed=clusters_reversed)
    )


def empty_model(config: ModelConfig, *, origin: str, num_tensors: int) -> TransformerXL:
    """A model on the meta device: an absurd config is rejected before it takes memory.

    Raises ConfigError if a model with this config cannot consist of `num_tensors` tensors.
    """
    # A meta tensor takes no memory, but a module does: 10^9 layers would not fit.
    if config.n_layer > num_tensors:
        raise ConfigError(f"{origin}: n_layer={config.n_layer}, but only {num_tensors} tensors")
    try:
        with torch.device("meta"):
            return TransformerXL(config)
    except RuntimeError as error:  # sizes that overflow 64 bits
        raise ConfigError(f"{origin}: no model can have this config: {error}") from None


def assign_weights(model: TransformerXL, weights: Mapping[str, Tensor]) -> TransformerXL:
    """Make `weights` the parameters of a model on the meta device, without a copy.

    The model is in evaluation mode, as other libraries return models that they load.
    """
    model.load_state_dict(weights, assign=True)
    return model.eval()


def check_tensors(
    tensors: Mapping[str, object], expected: Mapping[str, Tensor], *, origin: str
) -> dict[str, Tensor]:
    """The tensors in fp32. Raises CheckpointError unless names and shapes are those of `expected`
    and all values are finite.
    """
    differences = {
        "misses": expected.keys() - tensors.keys(),
        "has tensors unknown to this architecture:": tensors.keys() - expected.keys(),
    }
    problems = [f"{problem} {_list(names)}" for problem, names in differences.items() if names]
    if problems:
        raise CheckpointError(
            f"{origin} {' and '.join(problems)}; the config is not that of these weights"
        )
    return {
        name: _checked(tensors[name], expected[name], origin=f"{origin}: {name}")
        for name in expected
    }


def _checked(tensor: object, expected: Tensor, *, origin: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{origin} is {type(tensor).__name__}, expected a tensor")
    if tensor.shape != expected.shape:
        raise CheckpointError(
            f"{origin} has shape {tuple(tensor.shape)}, the config says {tuple(expected.shape)}"
        )
    # Another layout or device (meta) can come from a pickle, and the checks below would fail on it.
    dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not (dense and tensor.is_floating_point()):
        raise CheckpointError(f"{origin} is {tensor.dtype}, {tensor.layout}; expected dense floats")
    # fp32 for every format: fp16 and bf16 convert exactly, and parameters are trained in fp32.
    tensor = tensor.detach().to(torch.float32)
    if num_bad := int((~tensor.isfinite()).sum()):
        raise CheckpointError(
            f"{origin} is not finite in {num_bad:,} of {tensor.numel():,} values; the model it "
            "was saved from had diverged, or the file is damaged"
        )
    return tensor


def _tied_names(config: ModelConfig) -> dict[str, str]:
    """Second name of a tied tensor -> its first name, which `from_original` reads."""
    names = {}
    if config.tie_weight:
        for table in range(len(config.table_bounds)):
            names[f"crit.out_layers.{table}.weight"] = f"word_emb.emb_layers.{table}.weight"
    # With div_val > 1 every cluster has its own projection; else all clusters use the first.
    for cluster in range(config.num_clusters):
        if config.has_projection and config.is_tied(cluster):
            table = cluster if config.div_val > 1 else 0
            names[f"crit.out_projs.{cluster}"] = f"word_emb.emb_projs.{table}"
    if not config.untie_r:
        for bias in ("r_w_bias", "r_r_bias"):
            names |= {f"layers.{i}.dec_attn.{bias}": bias for i in range(config.n_layer)}
    return names


def _list(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
