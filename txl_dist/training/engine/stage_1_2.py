"""ZeRO stages 1 and 2: optimizer state is sharded (at 2 gradients too), parameters are whole.

Uses private attributes of DeepSpeed. Its version is pinned, and
`tests/properties/test_elastic_resume.py` fails if they change.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from txl_dist.checkpoint.snapshot import Fragment
from txl_dist.errors import ConfigError
from txl_dist.training.engine.interface import Accept, Decision, Engine, replaced_method
from txl_dist.training.engine.muon import FlatMatrices, Muon


class Stage12Engine(Engine):
    """fp32 masters and optimizer state sharded over the ranks."""

    def fragments(self) -> Iterator[Fragment]:
        """The slices that DeepSpeed has assigned to this rank."""
        parameters: Iterable[tuple[str, Any]] = self.model.named_parameters()
        for name, parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is None:  # the parameter is entirely on other ranks
                continue
            master = mapping.get_hp_fragment().detach()
            if master.numel():
                states = {key: mapping.get_optim_state_fragment(key) for key in self._states[name]}
                start = mapping.lp_fragment_address.start
                yield Fragment(name, tuple(parameter.shape), start, master, states)

    def _update(self, accept: Accept) -> Decision:
        # DeepSpeed discards a step with an infinite norm. So its own function for the norm asks
        # `accept`, and returns infinity for a norm that is rejected (docs/decisions/0018).
        zero = self._engine.optimizer
        decision: Decision | None = None

        def judged_norm() -> Tensor:
            nonlocal decision
            norm = type(zero).scaled_global_norm(zero)
            decision = accept(norm)
            # On the host: DeepSpeed reads it several times, and would wait for a GPU each time.
            value = decision.gradient_norm if decision.is_accepted else torch.inf
            return torch.tensor(value, dtype=norm.dtype)

        with replaced_method(zero, "scaled_global_norm", judged_norm):
            self._engine.step()
        assert decision is not None
        return decision

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The partitions to which DeepSpeed has reduced the gradients."""
        parameters: Iterable[tuple[str, Any]] = self.model.named_parameters()
        for name, parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is not None and mapping.get_hp_fragment().numel():
                yield name, mapping.get_lp_grad_fragment(parameter._index_in_param_group)

    def _refresh_weights(self) -> None:
        self._engine.optimizer.update_lp_params()

    def _create_optimizer_state(self) -> None:
        super()._create_optimizer_state()
        if isinstance(self._optimizer, Muon):
            self._optimizer.flat = self._flat_matrices()
        # Link each parameter to its slice of the state that now exists.
        self._engine.optimizer._hp_optimizer_states_linked = False
        self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        self._require_own_slices()

    def _require_own_slices(self) -> None:
        """Raise ConfigError unless the fragments are slices of their parameters.

        Some options of DeepSpeed order its flat tensors in another way than its mapping says. Then
        training is right, and every checkpoint wrong.
        """
        parameters = dict(self.model.named_parameters())
        for each in self.fragments():
            own = parameters[each.name].detach().reshape(-1)[each.start : each.stop]
            if not torch.equal(own.to(each.master.device), each.master):
                raise ConfigError(
                    f"DeepSpeed maps other numbers than those of {each.name} to it, so checkpoints "
                    "would be wrong. Remove the options in deepspeed.extra that change the order "
                    "of its partitions"
                )

    def _flat_matrices(self) -> dict[int, FlatMatrices]:
        """Where the matrices of Muon's groups are in DeepSpeed's flat tensors."""
        zero = self._engine.optimizer
        groups = enumerate(self._optimizer.param_groups)
        return {
            id(group["params"][0]): FlatMatrices(
                shapes=tuple(tuple(p.shape) for p in zero.round_robin_bit16_groups[number]),
                offsets=tuple(zero.round_robin_bit16_offsets[number]),
                rank=self._world.rank,
                all_gather=self._world.all_gather_parts,
            )
            for number, group in groups
            if group["rule"] == "muon"
        }
