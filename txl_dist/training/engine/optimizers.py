"""The optimizers, the groups of parameters that they update, and the average of the weights.

All keep a `step` count and the states that their parameter groups name, of the shape of the
parameter or of this rank's part of it, so that a checkpoint can store them by parameter and range.
To add one, write its class here, and an entry in `OPTIMIZERS`; its name and settings are in
config/training_config.py.

The methods of torch's optimizers are used without their decorators for compilation, whose first
call imports the compiler: 1.6 s of CPU time at every start of a rank.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn, optim

from txl_dist.checkpoint.tensors import AVERAGE
from txl_dist.config.run_config import Precision
from txl_dist.config.training_config import OptimizerConfig, Role
from txl_dist.errors import ConfigError
from txl_dist.model.layer_parts import StackedLinear
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import TORCH_DTYPE

ADAM_STATES = ("exp_avg", "exp_avg_sq")
"""Running means of the gradient and of its square."""
MUON_STATES = ("momentum_buffer",)


class EagerOptimizer(optim.Optimizer):
    """Base class. `step` of a subclass needs `torch.no_grad()`, which is among the decorators.

    It is created with parameter groups, and lr, betas and eps as keywords.
    """

    states: ClassVar[tuple[str, ...]] = ADAM_STATES
    """Names of the states of each parameter."""
    hidden_states: ClassVar[tuple[str, ...] | None] = None
    """Those of hidden matrices, if it updates them by a rule of its name and the rest by Adam's."""
    needs_whole_matrices: ClassVar[bool] = False
    """Its rule for hidden matrices needs all of a matrix. So ZeRO stages 1 and 2, which cut
    matrices, set `flat`."""
    updates_together: ClassVar[bool] = False
    """It holds the updates of all parameters of a group at the same time."""
    flat: dict[int, "FlatMatrices"]
    """By id of a flat parameter. Without an entry, a parameter is a whole matrix."""
    product_dtype = torch.bfloat16
    """Of its matrix products on GPUs."""

    add_param_group = inspect.unwrap(optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(optim.Optimizer.zero_grad)


# torch's: DeepSpeed's variants compile for about a minute at the first start.
class Adam(EagerOptimizer, optim.Adam):
    """`torch.optim.Adam`, one kernel for all parameters."""

    step = torch.no_grad()(inspect.unwrap(optim.Adam.step))

    def __init__(self, params: list[dict[str, Any]], **adam: Any) -> None:
        super().__init__(params, fused=True, **adam)


class AdamW(Adam, optim.AdamW):
    """`torch.optim.AdamW`, which has torch's `Adam.step` too."""


class Lamb(EagerOptimizer):
    """Adam whose step is scaled, per parameter, to the norm of the parameter.

        m, v      Adam's running means with their bias corrections
        update    m / (sqrt(v) + eps) + weight_decay * w
        w         w - lr * (|w| / |update|) * update         the ratio is 1 if one of the norms is 0

    The norms are those of whole parameters. ZeRO cuts parameters at the ends of ranks' partitions,
    so it runs at stage 0 only (config/training_config.py refuses the others). States: exp_avg,
    exp_avg_sq and step. Source: You et al. 2020, arXiv:1904.00962, algorithm 2.
    """

    updates_together = True

    def __init__(self, params: list[dict[str, Any]], **adam: Any) -> None:
        super().__init__(params, {**adam, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            if parameters := _with_gradient(group):
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        # `_foreach`: on a GPU, one by one they are 26 operations per parameter.
        (beta1, beta2), gradients = group["betas"], _gradients(parameters)
        means, squares, steps = (
            [self.state[p][name] for p in parameters] for name in (*ADAM_STATES, "step")
        )
        torch._foreach_add_(steps, 1)
        step = steps[0]  # that of all, because a step updates every parameter
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - beta2)
        roots = torch._foreach_div(squares, _correction(beta2, step))
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, _correction(beta1, step))
        torch._foreach_div_(updates, roots)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        norm_P, update_norm_P = (
            torch.stack(torch._foreach_norm(tensors)) for tensors in (parameters, updates)
        )
        # Not an `if`: reading the norms would wait for the device.
        has_ratio_P = (norm_P > 0) & (update_norm_P > 0)
        ratio_P = torch.where(has_ratio_P, norm_P / update_norm_P.clamp(min=1e-38), 1.0)
        torch._foreach_mul_(updates, (ratio_P * group["lr"]).unbind())
        torch._foreach_sub_(parameters, updates)


def _with_gradient(group: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _correction(beta: float, step: torch.Tensor) -> torch.Tensor | float:
    """1 - beta^step."""
    # expm1: in fp32, 1 - 0.999^1 would have only four correct digits.
    return -torch.expm1(step * math.log(beta)) if beta else 1.0


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial: five iterations map singular values to about 1."""
NUM_ITERATIONS = 5


class FlatMatrices:
    """A group of matrices in one flat tensor, of which each rank has an equal part."""

    def __init__(
        self,
        shapes: Iterable[tuple[int, ...]],
        offsets: Iterable[int],
        *,
        num_stacked: int,
        rank: int,
        all_gather: Callable[[Tensor], Tensor],
    ) -> None:
        """Of weights of these shapes, which are `num_stacked` matrices each, at these offsets in
        the whole flat tensor. `all_gather` returns the parts of all ranks in one flat tensor.
        """
        self._rank, self._all_gather = rank, all_gather
        self._matrices = [
            ((rows // num_stacked, columns), offset + number * rows * columns // num_stacked)
            for (rows, columns), offset in zip(shapes, offsets, strict=True)
            for number in range(num_stacked)
        ]

    def orthogonalised(self, part: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """This rank's part of the update. Collective. Padding between matrices becomes 0."""
        whole = self._all_gather(part)
        start = self._rank * part.numel()
        own = [
            (shape, offset)
            for shape, offset in self._matrices
            if start < offset + math.prod(shape) and offset < start + part.numel()
        ]
        results = all_orthogonalised(
            [whole[offset : offset + math.prod(shape)].view(shape) for shape, offset in own], dtype
        )
        update = torch.zeros_like(part)
        for (shape, offset), matrix in zip(own, results, strict=True):
            low = max(start, offset)
            high = min(start + part.numel(), offset + math.prod(shape))
            update[low - start : high - start] = matrix.reshape(-1)[low - offset : high - offset]
        return update


class Muon(AdamW):
    """Muon for groups with `rule: muon`, AdamW for all others, also on ZeRO's flat partitions.

    A weight of several stacked matrices (`StackedLinear`) is updated as these, one by one.

        B     momentum * B + (1 - momentum) * gradient       elementwise, on this rank's part
        U     (1 - momentum) * gradient + momentum * B       Nesterov; elementwise
        O     nearest orthogonal matrix to U, about          needs the whole matrix
        w     w * (1 - lr * weight_decay) - lr * 0.2 sqrt(max(rows, columns)) * O

    The factor 0.2 sqrt(max(rows, columns)) gives an update the root mean square of AdamW's, so one
    learning rate and one schedule serve both groups.

    Under ZeRO 1 and 2 the momentum stays sharded. U is gathered, and each rank orthogonalises the
    matrices of which it owns a part. The products are in fp32 on CPUs, and in runs in fp32: bf16
    rounds the differences of 1e-8 between numbers of ranks to differences of 4e-3. On GPUs, runs in
    bf16 compute them in bf16, as torch.optim.Muon does; in fp32 they took a third of a step.

    Sources: K. Jordan 2024, https://kellerjordan.github.io/posts/muon/; the factor: Liu et al.
    2025, arXiv:2502.16982.
    """

    hidden_states = MUON_STATES
    needs_whole_matrices = True
    updates_together = True
    momentum = 0.95

    def __init__(self, params: list[dict[str, Any]], **adam: Any) -> None:
        super().__init__(params, **adam)
        self.flat = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient. Collective if parameters are flat."""
        # DeepSpeed calls it once per group, with only that group in `param_groups`.
        groups = self.param_groups
        for group in groups:
            if group["rule"] == "muon" and (parameters := _with_gradient(group)):
                self._update(parameters, group)
        self.param_groups = [group for group in groups if group["rule"] != "muon"]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = _gradients(parameters)
        momenta, steps = (
            [self.state[p][name] for p in parameters] for name in (*MUON_STATES, "step")
        )
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        updates = list(torch._foreach_lerp(gradients, momenta, self.momentum))
        if flat := self.flat.get(id(parameters[0])):
            updates = [flat.orthogonalised(updates[0], self.product_dtype)]
        else:
            count = group["num_stacked"]
            matrices = [matrix for update in updates for matrix in update.chunk(count)]
            matrices = all_orthogonalised(matrices, self.product_dtype)
            starts = range(0, len(matrices), count)
            updates = [torch.cat(matrices[start : start + count]) for start in starts]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def all_orthogonalised(matrices: Sequence[Tensor], dtype_on_gpus: torch.dtype) -> list[Tensor]:
    """Each of the matrices `orthogonalised`; on GPUs, all of one shape at the same time."""
    if not matrices or matrices[0].device.type == "cpu":
        return [orthogonalised(matrix) for matrix in matrices]
    return orthogonalised_by_shape(matrices, dtype_on_gpus)


def orthogonalised_by_shape(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Each of the matrices `orthogonalised`, with as many operations as for one per shape."""
    numbers_of: dict[tuple[int, ...], list[int]] = {}
    for number, matrix in enumerate(matrices):
        numbers_of.setdefault(tuple(matrix.shape), []).append(number)
    results: dict[int, Tensor] = {}
    for numbers in numbers_of.values():
        stack = torch.stack([matrices[number] for number in numbers])
        results |= zip(numbers, orthogonalised(stack, dtype).unbind(), strict=True)
    return [results[number] for number in range(len(matrices))]


def orthogonalised(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """U V^T of the singular value decomposition U S V^T, about, x 0.2 sqrt(max(rows, columns)).

    By Newton-Schulz iterations in `dtype`, whose result has singular values between 0.7 and 1.2;
    singular values below 1e-3 of the Frobenius norm stay smaller. `matrix`: one, or a stack
    [N, rows, columns].
    """
    a, b, c = NEWTON_SCHULZ
    rows, columns = matrix.shape[-2:]
    # The smaller of the two Gram matrices.
    x = matrix.mT if rows > columns else matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    x = x.to(dtype or x.dtype)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        if x.ndim == 2:
            x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
        else:  # in bf16, sums before they are rounded
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if rows > columns else x
    return x.to(matrix.dtype) * (0.2 * math.sqrt(max(rows, columns)))


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
    return hidden_matrices(model) | {
        name for name, _ in model.named_parameters() if name.split(".")[-2:-1] == ["projections"]
    }


def _role(name: str, hidden: frozenset[str]) -> Role:
    """The role of a parameter (config/training_config.py). A shared weight is embedding."""
    if name in hidden:
        return "hidden"
    if name.startswith("table."):
        return "embedding"
    is_head = name.startswith(("softmax.weights.", "softmax.projections."))
    return "head" if is_head or name == "softmax.cluster_weight" else "other"


def freeze(model: TransformerXL, config: OptimizerConfig) -> None:
    """Let the parameters with a factor of 0 have no gradients.

    Raises ConfigError if nothing would be trained.
    """
    trained = {id(p) for group in parameter_groups(model, config) for p in group["params"]}
    if not trained:
        raise ConfigError(
            f"optimizer.lr_factors={config.lr_factors} trains nothing: the model has no parameter "
            "of another role. Give one of them a factor above 0"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def parameter_groups(model: TransformerXL, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups of the trained parameters for a torch optimizer, in the order of the first of each.

    Roles follow from the modules, not from names or numbers of dimensions. DeepSpeed's own rule for
    Muon, `ndim >= 2` and no "embed" in the name, would take the embedding tables, the cluster
    weights of the adaptive softmax and the position biases for hidden matrices.

    Besides torch's keys a group has `rule` (adam, or the optimizer's own for hidden matrices),
    `states`, the names of the optimizer's states of its parameters, `lr_factor`, of its learning
    rate, and `num_stacked`, the matrices in each of its weights.
    """
    hidden, decayed = hidden_matrices(model), matrices(model)
    average, entry = (AVERAGE,) if config.averaging else (), OPTIMIZERS[config.name]
    stacked = {
        f"{name}.weight": module.num_stacked
        for name, module in model.named_modules()
        if isinstance(module, StackedLinear)
    }
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        states, rule = entry.states, "adam"
        if entry.hidden_states is not None and name in hidden:
            states, rule = entry.hidden_states, config.name
        weight_decay = config.weight_decay if name in decayed else 0.0
        lr_factor = config.lr_factors.get(_role(name, hidden), 1.0)
        if lr_factor == 0:
            continue
        empty: dict[str, Any] = {
            "params": [],
            "rule": rule,
            "weight_decay": weight_decay,
            "lr_factor": lr_factor,
            "num_stacked": (num_stacked := stacked.get(name, 1) if rule != "adam" else 1),
            "states": (*states, *average),
        }
        key = rule, weight_decay, lr_factor, num_stacked
        groups.setdefault(key, empty)["params"].append(parameter)
    return list(groups.values())


def states_by_name(
    model: TransformerXL, groups: list[dict[str, Any]]
) -> dict[str, tuple[str, ...]]:
    """The names of the optimizer states of every parameter; none of a frozen one."""
    states = {id(p): group["states"] for group in groups for p in group["params"]}
    return {name: states.get(id(p), ()) for name, p in model.named_parameters()}


def averaging_weight(config: OptimizerConfig, step: int) -> float:
    """Return how much the weights after step `step` count in the average up to that step.

    The average is the mean of the weights since step `averaging_start_step`, as averaged SGD keeps
    it (Polyak & Juditsky 1992), and a copy before; the paper's Penn Treebank model averages its
    weights (arXiv:1901.02860).
    """
    return 1 / max(1, step - config.averaging_start_step + 1)


OPTIMIZERS: dict[str, type[EagerOptimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "lamb": Lamb,
    "muon": Muon,
}
"""By the value of `OptimizerConfig.name`."""


def create_optimizer(
    model: TransformerXL, config: OptimizerConfig, precision: Precision = "bf16"
) -> EagerOptimizer:
    """The optimizer named `config.name`, with the groups of `parameter_groups`.

    `precision`: that of the run, and on GPUs of the optimizer's matrix products.
    """
    create: Any = OPTIMIZERS[config.name]
    optimizer: EagerOptimizer = create(
        parameter_groups(model, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    optimizer.product_dtype = TORCH_DTYPE[precision]
    return optimizer
