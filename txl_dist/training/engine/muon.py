"""Muon for hidden matrices, AdamW for all other parameters, also on ZeRO's flat partitions.

    B        momentum * B + (1 - momentum) * gradient        elementwise, on this rank's part
    U        (1 - momentum) * gradient + momentum * B        Nesterov; elementwise
    O        nearest orthogonal matrix to U, about           needs the whole matrix
    w        w * (1 - lr * weight_decay) - lr * 0.2 sqrt(max(rows, columns)) * O

The factor 0.2 sqrt(max(rows, columns)) gives an update the root mean square of AdamW's, so one
learning rate and one schedule serve both groups.

Under ZeRO 1 and 2 the momentum stays sharded. U is gathered, and each rank orthogonalises the
matrices of which it owns a part. The products are in fp32, not in bf16 as in torch.optim.Muon: bf16
would round the differences of 1e-8 between numbers of ranks to differences of 4e-3.

Sources: K. Jordan 2024, https://kellerjordan.github.io/posts/muon/; the factor: Liu et al. 2025,
arXiv:2502.16982.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from txl_dist.training.engine.eager_optimizers import AdamW

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial: five iterations map singular values to about 1."""
NUM_ITERATIONS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatMatrices:
    """A group of matrices in one flat tensor, of which each rank has an equal part."""

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """Offset of each matrix in the whole flat tensor."""
    rank: int
    all_gather: Callable[[Tensor], Tensor]
    """The parts of all ranks, in one flat tensor."""

    def orthogonalised(self, part: Tensor) -> Tensor:
        """This rank's part of the update. Collective. Padding between matrices becomes 0."""
        whole = self.all_gather(part)
        start = self.rank * part.numel()
        update = torch.zeros_like(part)
        for shape, offset in zip(self.shapes, self.offsets, strict=True):
            stop = offset + math.prod(shape)
            low, high = max(start, offset), min(start + part.numel(), stop)
            if low < high:
                matrix = orthogonalised(whole[offset:stop].view(shape)).reshape(-1)
                update[low - start : high - start] = matrix[low - offset : high - offset]
        return update


class Muon(AdamW):
    """Updates groups with `rule: muon` by Muon and the others by AdamW."""

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self._momentum = momentum
        self.flat: dict[int, FlatMatrices] = {}
        """By id of a flat parameter. Without an entry, a parameter is a whole matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient. Collective if parameters are flat."""
        # DeepSpeed calls it once per group, with only that group in `param_groups`.
        groups = self.param_groups
        for group in groups:
            if group["rule"] == "muon":
                for parameter in group["params"]:
                    self._update(parameter, group)
        self.param_groups = [group for group in groups if group["rule"] != "muon"]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        if gradient is None:
            return
        state["step"] += 1
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        update = gradient.lerp(momentum, self._momentum)
        flat = self.flat.get(id(parameter))
        update = orthogonalised(update) if flat is None else flat.orthogonalised(update)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


def orthogonalised(matrix: Tensor) -> Tensor:
    """U V^T of the singular value decomposition U S V^T, about, x 0.2 sqrt(max(rows, columns)).

    By Newton-Schulz iterations, whose result has singular values between 0.7 and 1.2; singular
    values below 1e-3 of the Frobenius norm stay smaller.
    """
    a, b, c = NEWTON_SCHULZ
    # The smaller of the two Gram matrices.
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / torch.linalg.matrix_norm(x).clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    return x * (0.2 * math.sqrt(max(matrix.shape)))
