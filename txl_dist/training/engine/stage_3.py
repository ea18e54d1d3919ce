"""ZeRO stage 3: parameters, gradients and optimizer state are sharded over the ranks.

Uses private attributes of DeepSpeed. Its version is pinned, and
`tests/properties/test_elastic_resume.py` fails if they change.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from txl_dist.checkpoint.snapshot import Fragment
from txl_dist.config.run_config import RunConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.engine.interface import Accept, Decision, Engine, replaced_method


class Stage3Engine(Engine):
    """Each rank holds one of `num_ranks` equal parts of each flattened parameter.

    DeepSpeed gathers the weights of a module for its forward and backward, and keeps parameters
    below `stage3_param_persistence_threshold` gathered all the time.
    """

    def __init__(self, model: TransformerXL, config: RunConfig, world: World, **shape: int) -> None:
        # Copied before DeepSpeed replaces the parameters by empty ones and adds its hooks.
        self._meta_model = deepcopy(model).to("meta")
        super().__init__(model, config, world, **shape)

    @contextmanager
    def whole_model(self) -> Iterator[TransformerXL]:
        """A copy of the model without DeepSpeed's hooks, which holds the gathered weights.

        With the hooks, a forward would release gathered weights and gather them again, and every
        rank would have to run the same number of forwards. Needs memory for all weights.
        """
        import deepspeed

        model = deepcopy(self._meta_model)
        with deepspeed.zero.GatheredParameters(self.model.parameters()):
            weights = {name: p.detach() for name, p in self.model.named_parameters()}
            model.load_state_dict(weights, assign=True)
            yield model

    def fragments(self) -> Iterator[Fragment]:
        """The rank-th part of each flattened parameter, without the padding at the end."""
        for name, parameter in self.model.named_parameters():
            fragment = self._part(name, parameter)
            if fragment.master.numel():
                yield fragment

    def _part(self, name: str, parameter: Any) -> Fragment:
        # Masters of small parameters are sharded too, although their weights stay gathered.
        part = self._owned_view(parameter)
        start, owned = self._range_of(name, part)
        states = {key: self._owned_view(parameter, key)[owned] for key in self._states[name]}
        return Fragment(name, self.shapes[name], start, part[owned], states)

    def _update(self, accept: Accept) -> Decision:
        # As at stages 1 and 2. DeepSpeed combines the norms of its groups after this function.
        from deepspeed.runtime.utils import combine_grad_norm_groups

        zero = self._engine.optimizer
        decision: Decision | None = None

        def judged_norms() -> list[Tensor]:
            nonlocal decision
            norms = type(zero)._get_norm_groups(zero)
            decision = accept(combine_grad_norm_groups(norms))
            return norms if decision.is_accepted else [torch.tensor(torch.inf)]

        with replaced_method(zero, "_get_norm_groups", judged_norms):
            self._engine.step()
        assert decision is not None
        return decision

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The rank-th parts of the gradients, without the padding at the end."""
        from deepspeed.utils import safe_get_local_grad

        parameters: Iterable[tuple[str, Any]] = self.model.named_parameters()
        for name, parameter in parameters:
            part = safe_get_local_grad(parameter)
            _, owned = self._range_of(name, part)
            if part[owned].numel():
                yield name, part[owned]

    def _range_of(self, name: str, part: Tensor) -> tuple[int, slice]:
        """Where this rank's part starts in the flattened parameter, and its range of elements."""
        start = self._world.rank * part.numel()
        return start, slice(0, max(0, min(part.numel(), math.prod(self.shapes[name]) - start)))

    def _owned_view(self, parameter: Any, state: str | None = None) -> Tensor:
        """This rank's part of a parameter's master or optimizer state, 1-D, with its padding."""
        # Not `safe_get_local_fp32_param`: if the optimizer is on the host, it returns a copy on the
        # GPU, and a checkpoint would be loaded into that copy.
        view, _ = self._engine.optimizer._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=state
        )
        return view.detach()

    def _refresh_weights(self) -> None:
        # As in DeepSpeed's own step. Weights that are gathered now, as the small ones always are,
        # have to be released first.
        self._engine.empty_partition_cache()
        for group in range(len(self._engine.optimizer.fp32_partitioned_groups_flat)):
            self._engine.optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def _optimized_tensors(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        # DeepSpeed fills the optimizer's groups only during its step. At this stage all parameters
        # have the same states, because Muon is refused.
        flat = self._engine.optimizer.fp32_partitioned_groups_flat
        return [(tensor, self.optimizer_states) for tensor in flat]
