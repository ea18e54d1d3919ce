"""What differs between ZeRO stages: which tensors a rank owns, and where a step can be rejected.

    0       every rank holds all parameters, gradients and optimizer state
    1, 2    optimizer state is sharded (at 2 gradients too), parameters are whole
    3       parameters, gradients and optimizer state are sharded over the ranks

Uses private attributes of DeepSpeed. Its version is pinned, and
`tests/properties/test_elastic_resume.py` fails if they change.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from txl_dist.checkpoint.tensors import Fragment
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.engine.interface import Accept, Decision, Engine
from txl_dist.training.engine.optimizers import FlatMatrices


class Stage0Engine(Engine):
    """Data parallel training without sharding.

    One rank has nothing to reduce, for which DeepSpeed would copy all gradients twice, and clips by
    the norm that it knows.
    """

    def __init__(self, model: TransformerXL, config: RunConfig, world: World, **shape: int) -> None:
        super().__init__(model, config, world, **shape)
        if world.num_ranks == 1:
            # DeepSpeed would flatten all gradients, multiply them by 1 and copy them back.
            self._engine.enable_backward_allreduce = False

    def _update(self, accept: Accept) -> Decision:
        # Gradients are whole and reduced on every rank; DeepSpeed computes no norm at this stage.
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # As DeepSpeed computes it to clip, so that the numbers are those of several ranks.
        decision = accept(torch.stack(torch._foreach_norm(gradients)).square().sum().sqrt())
        if decision.is_accepted:
            if self._world.num_ranks == 1:
                self._clip(gradients, decision.gradient_norm)
            self._engine.step()
        else:
            self._engine.zero_grad()
        return decision

    def _clip(self, gradients: list[Tensor], norm: float) -> None:
        most = self._config.gradient_clipping
        # In fp32, like DeepSpeed.
        factor = float(torch.tensor(float(most)) / (torch.tensor(norm) + 1e-6))
        if most and factor < 1:
            torch._foreach_mul_(gradients, factor)

    def fragments(self) -> Iterator[Fragment]:
        """1/num_ranks of each parameter: all ranks hold the same, so they share the writing."""
        for name, parameter in self.model.named_parameters():
            yield from self._share(name, parameter)

    def fragments_to_load(self) -> Iterator[Fragment]:
        """Whole parameters, because every rank needs a full copy."""
        for name, parameter in self.model.named_parameters():
            yield self._slice(name, parameter, 0, parameter.numel())


class Stage12Engine(Engine):
    """fp32 masters and optimizer state sharded over the ranks; frozen parameters are whole."""

    def fragments(self) -> Iterator[Fragment]:
        """The slices that DeepSpeed has assigned to this rank, and its share of frozen ones."""
        for name, parameter in self.model.named_parameters():
            own = self._owned if parameter.requires_grad else self._share
            yield from own(name, parameter)

    def fragments_to_load(self) -> Iterator[Fragment]:
        """The slices of this rank, and whole frozen parameters, which every rank needs."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield from self._owned(name, parameter)
            else:
                yield self._slice(name, parameter, 0, parameter.numel())

    def _owned(self, name: str, parameter: Any) -> Iterator[Fragment]:
        mapping = parameter._hp_mapping
        if mapping is None:  # the parameter is entirely on other ranks
            return
        master = mapping.get_hp_fragment().detach()
        if master.numel():
            states = {key: mapping.get_optim_state_fragment(key) for key in self._states[name]}
            yield self._fragment(name, mapping.lp_fragment_address.start, master, states)

    def _update(self, accept: Accept) -> Decision:
        def checked(norm: Tensor, decision: Decision) -> Tensor:
            # On the host: DeepSpeed reads it several times, and would wait for a GPU each time.
            value = decision.gradient_norm if decision.is_accepted else torch.inf
            return torch.tensor(value, dtype=norm.dtype)

        return self._step_sharded(accept, "scaled_global_norm", lambda norm: norm, checked)

    def _refresh_weights(self) -> None:
        self._engine.optimizer.update_lp_params()

    def _create_optimizer_state(self) -> None:
        super()._create_optimizer_state()
        if self._optimizer.needs_whole_matrices:
            self._optimizer.flat = self._flat_matrices()
        # Links each parameter to its slice of the optimizer's state. DeepSpeed does it in the first
        # step, which is too late to load a checkpoint.
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
        """Where the optimizer's whole matrices are in DeepSpeed's flat tensors."""
        zero = self._engine.optimizer
        groups = enumerate(self._optimizer.param_groups)
        return {
            id(group["params"][0]): FlatMatrices.of(
                [tuple(p.shape) for p in zero.round_robin_bit16_groups[number]],
                zero.round_robin_bit16_offsets[number],
                num_stacked=group["num_stacked"],
                rank=self._world.rank,
                all_gather=self._world.all_gather_parts,
            )
            for number, group in groups
            if group["rule"] != "adam"
        }


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
        # Masters of small parameters are sharded too, although their weights stay gathered. Frozen
        # weights have none: their shards are what is gathered.
        is_trained = parameter.requires_grad
        part = self._owned_view(parameter) if is_trained else parameter.ds_tensor.detach()
        start, owned = self._range_of(name, part)
        states = {key: self._owned_view(parameter, key)[owned] for key in self._states[name]}
        return self._fragment(name, start, part[owned], states)

    def _update(self, accept: Accept) -> Decision:
        # DeepSpeed combines the norms of its groups after this method.
        from deepspeed.runtime.utils import combine_grad_norm_groups

        def checked(norms: list[Tensor], decision: Decision) -> list[Tensor]:
            return norms if decision.is_accepted else [torch.tensor(torch.inf)]

        return self._step_sharded(accept, "_get_norm_groups", combine_grad_norm_groups, checked)

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
        # have the same states, because optimizers that need whole matrices are refused.
        flat = self._engine.optimizer.fp32_partitioned_groups_flat
        return [(tensor, self.optimizer_states) for tensor in flat]
