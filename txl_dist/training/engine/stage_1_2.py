"""ZeRO stages 1 and 2: optimizer state is sharded (at 2 gradients too), parameters are whole.

Uses private attributes of DeepSpeed. Its version is pinned, and
`tests/properties/test_elastic_resume.py` fails if they change.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from txl_dist.checkpoint.fragments import OPTIMIZER_STATES, Fragment
from txl_dist.training.engine.interface import Engine


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
                states = {key: mapping.get_optim_state_fragment(key) for key in OPTIMIZER_STATES}
                start = mapping.lp_fragment_address.start
                yield Fragment(name, tuple(parameter.shape), start, master, states)

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
        # Link each parameter to its slice of the state that now exists.
        self._engine.optimizer._hp_optimizer_states_linked = False
        self._engine.optimizer._lazy_init_hp_params_optimizer_state()
