"""Groups of parameters: which weights decay, and which ones Muon orthogonalises.

Roles follow from the modules, not from names or numbers of dimensions. DeepSpeed's own rule for
Muon, `ndim >= 2` and no "embed" in the name, would take the embedding tables, the cluster weights
of the adaptive softmax and the position biases for hidden matrices.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from txl_dist.checkpoint.snapshot import AVERAGE
from txl_dist.config.optimizer_config import OptimizerConfig
from txl_dist.model.transformer_xl import TransformerXL

ADAM_STATES = ("exp_avg", "exp_avg_sq")
"""Running means of the gradient and of its square."""
MUON_STATES = ("momentum_buffer",)


def hidden_matrices(model: TransformerXL) -> frozenset[str]:
    """Names of the weights of linear layers: query, keys and values, output, feed-forward."""
    return frozenset(
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)
    )


def matrices(model: TransformerXL) -> frozenset[str]:
    """Names of all weights that linear maps multiply with, except those with one row per id.

    The projections of narrow embeddings are matrices. Tables, the softmax's weights and cluster
    weights (one vector per token or cluster), position biases, LayerNorms and biases are not.
    """
    projections = (
        name for name, _ in model.named_parameters() if name.split(".")[-2:-1] == ["projections"]
    )
    return hidden_matrices(model) | frozenset(projections)


def parameter_groups(model: TransformerXL, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, in the order of their first parameters.

    Besides torch's keys a group has `rule` (muon or adam) and `states`, the names of the
    optimizer's states of its parameters.
    """
    hidden, decayed = hidden_matrices(model), _decayed(model, config)
    average = (AVERAGE,) if config.averaging else ()
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        rule = "muon" if config.name == "muon" and name in hidden else "adam"
        weight_decay = config.weight_decay if name in decayed else 0.0
        states = (*(MUON_STATES if rule == "muon" else ADAM_STATES), *average)
        empty: dict[str, Any] = {
            "params": [],
            "rule": rule,
            "weight_decay": weight_decay,
            "states": states,
        }
        groups.setdefault((rule, weight_decay), empty)["params"].append(parameter)
    return list(groups.values())


def _decayed(model: TransformerXL, config: OptimizerConfig) -> frozenset[str]:
    if config.weight_decay_parameters == "all":
        return frozenset(name for name, _ in model.named_parameters())
    return matrices(model)


def states_by_name(
    model: TransformerXL, groups: list[dict[str, Any]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, names of its optimizer states) of every parameter."""
    states = {id(p): group["states"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        yield name, states[id(parameter)]
