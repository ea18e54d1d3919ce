"""ZeRO stage 0: every rank holds all parameters, gradients and optimizer state."""

from collections.abc import Iterator

import torch
from torch import Tensor

from txl_dist.checkpoint.snapshot import Fragment
from txl_dist.training.engine.interface import Accept, Decision, Engine


class Stage0Engine(Engine):
    """Data parallel training without sharding."""

    def _update(self, accept: Accept) -> Decision:
        # Gradients are whole and reduced on every rank; DeepSpeed computes no norm at this stage.
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        decision = accept(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        if decision.is_accepted:
            self._engine.step()
        else:
            self._engine.zero_grad()
        return decision

    def fragments(self) -> Iterator[Fragment]:
        """1/num_ranks of each parameter: all ranks hold the same, so they share the writing."""
        rank, num_ranks = self._world.rank, self._world.num_ranks
        for name, parameter in self.model.named_parameters():
            size = parameter.numel()
            start, stop = rank * size // num_ranks, (rank + 1) * size // num_ranks
            if start < stop:
                yield self._slice(name, parameter, start, stop)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Slices of the gradients, which are whole on every rank."""
        parameters = dict(self.model.named_parameters())
        for fragment in self.fragments():
            gradient = parameters[fragment.name].grad
            assert gradient is not None
            yield fragment.name, gradient.view(-1)[fragment.start : fragment.stop]

    def fragments_to_load(self) -> Iterator[Fragment]:
        """Whole parameters, because every rank needs a full copy."""
        for name, parameter in self.model.named_parameters():
            yield self._slice(name, parameter, 0, parameter.numel())

    def _slice(self, name: str, parameter: Tensor, start: int, stop: int) -> Fragment:
        state = self._optimizer.state[parameter]
        return Fragment(
            name,
            tuple(parameter.shape),
            start,
            parameter.detach().view(-1)[start:stop],
            {key: state[key].view(-1)[start:stop] for key in self._states[name]},
        )
