"""Foreign tensors become a model: every name, shape and value checked, nothing guessed.

Works on tensors under the original's names (`txl_dist/model/original_weights.py`); reading files is
the business of `original.py`, `transformers.py` and `single_file.py`.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.original_weights import from_original, to_original
from txl_dist.model.transformer_xl import TransformerXL

_BUFFERS = ("pos_emb.inv_freq",)
"""Constants that the original saves with its parameters; computed here."""


def model_from_original(
    tensors: Mapping[str, object],
    config: ModelConfig,
    *,
    where: str,
    clusters_reversed: bool,
) -> TransformerXL:
    """The model of tensors by the original's names.

    What is tied may stand there once or under each of its names. Raises CheckpointError naming the
    tensor that is missing, unknown, misshapen, not finite, or tied but different.
    """
    model = empty_model(config, where=where, num_tensors=len(tensors))
    expected = to_original(model.state_dict(), config)
    repeated = _repeated(config)
    given = {name: tensor for name, tensor in tensors.items() if name not in _BUFFERS}
    for other, name in repeated.items():
        if other in given:  # some writers leave out one of the two, and not always the same
            given.setdefault(name, given[other])
            expected[other] = expected[name]
    checked = check_tensors(given, expected, where=where)
    for other, name in repeated.items():
        if other in checked and not torch.equal(checked[other], checked[name]):
            raise CheckpointError(
                f"{where}: {other} differs from {name}, but the config ties them; "
                "correct tie_weight, tie_projs or untie_r there"
            )
    return fill(model, from_original(checked, config, clusters_reversed=clusters_reversed))


def empty_model(config: ModelConfig, *, where: str, num_tensors: int) -> TransformerXL:
    """A model with shapes and no values, so an absurd config costs no memory before it is refused.

    Raises ConfigError if the config asks for what `num_tensors` tensors cannot be.
    """
    if config.n_layer > num_tensors:
        raise ConfigError(f"{where}: n_layer={config.n_layer}, but only {num_tensors} tensors")
    try:
        with torch.device("meta"):
            return TransformerXL(config)
    except RuntimeError as error:  # sizes beyond what an index can hold
        raise ConfigError(f"{where}: no model can have this config: {error}") from None


def fill(model: TransformerXL, weights: Mapping[str, Tensor]) -> TransformerXL:
    """Give an empty model its values, which it keeps rather than copies."""
    model.load_state_dict(weights, assign=True)
    return model


def check_tensors(
    given: Mapping[str, object], expected: Mapping[str, Tensor], *, where: str
) -> dict[str, Tensor]:
    """The given tensors in fp32, which are those expected by name and shape, and finite.

    Raises CheckpointError naming those that are not.
    """
    differing = {
        "misses": expected.keys() - given.keys(),
        "holds tensors unknown to this architecture:": given.keys() - expected.keys(),
    }
    told = [f"{what} {_list(names)}" for what, names in differing.items() if names]
    if told:
        raise CheckpointError(f"{where} {' and '.join(told)}; config and weights do not belong")
    return {
        name: _checked(given[name], expected[name], where=f"{where}: {name}") for name in expected
    }


def _checked(tensor: object, expected: Tensor, *, where: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{where} is no tensor but {type(tensor).__name__}")
    if tensor.shape != expected.shape:
        found, legal = tuple(tensor.shape), tuple(expected.shape)
        raise CheckpointError(f"{where} has shape {found}, the config says {legal}")
    dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not (dense and tensor.is_floating_point()):
        raise CheckpointError(f"{where} is {tensor.dtype}, {tensor.layout}; expected plain floats")
    tensor = tensor.detach().to(torch.float32)
    if num_bad := int((~tensor.isfinite()).sum()):
        raise CheckpointError(
            f"{where} is not finite in {num_bad:,} of {tensor.numel():,} values; the model it "
            "was saved from had diverged, or the file is damaged"
        )
    return tensor


def _repeated(config: ModelConfig) -> dict[str, str]:
    """Second name of a shared tensor -> its first, under which `from_original` reads it."""
    names = {}
    if config.tie_weight:
        for table in range(len(config.table_bounds)):
            names[f"crit.out_layers.{table}.weight"] = f"word_emb.emb_layers.{table}.weight"
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
