"""Engine: forward, backward and optimizer step of one model on all ranks.

It also knows which slice of each parameter and of its optimizer state this rank owns, so that a
checkpoint can be written and read slice by slice. The subclasses implement what differs between
ZeRO stages: which tensors a rank owns, and where a step can be rejected.

    0       every rank holds all parameters, gradients and optimizer state
    1, 2    optimizer state is sharded (at 2 gradients too), parameters are whole
    3       parameters, gradients and optimizer state are sharded over the ranks

Uses private attributes of DeepSpeed. Its version is pinned, and
`tests/properties/test_elastic_resume.py` fails if they change.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_dist.checkpoint.tensors import AVERAGE, Fragment
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.model.dropout import DropoutMasks
from txl_dist.model.memory import SequenceState
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.engine.deepspeed_setup import (
    deepspeed_settings,
    initialise_deepspeed,
    norm_checked_by,
)
from txl_dist.training.engine.optimizers import (
    FlatMatrices,
    averaging_weight,
    create_optimizer,
    states_by_name,
)


class Decision(NamedTuple):
    """Whether a step updates the weights."""

    gradient_norm: float
    """The norm that was checked, before clipping."""
    is_accepted: bool


Accept = Callable[[Tensor], Decision]
"""Reads the global gradient norm, a tensor without dimensions, and decides whether the weights are
updated. Must reject a norm that is not finite, and decide the same on every rank. An engine calls
it once per step: on a GPU, the host waits for the norm there."""


class Engine(ABC):
    """DeepSpeed around one model. `create_engine` selects the subclass of the ZeRO stage."""

    def __init__(
        self,
        model: TransformerXL,
        config: RunConfig,
        world: World,
        *,
        num_micro_batches: int,
        micro_batch_rows: int,
    ) -> None:
        settings = deepspeed_settings(
            config,
            num_ranks=world.num_ranks,
            num_micro_batches=num_micro_batches,
            micro_batch_rows=micro_batch_rows,
            on_gpu=world.device.type == "cuda",
        )
        self._world = world
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        """Shapes of the whole parameters. At stage 3 the model holds only shards of them."""
        model.to(world.device)
        self._optimizer = create_optimizer(model, config.optimizer, config.precision)
        self._states = states_by_name(model, self._optimizer.param_groups)
        self._config = config.optimizer
        self._num_updates = 0
        """The optimizer's step count, for which a GPU need not be read."""
        with world.timeouts(timeout_seconds=config.training.rank_timeout_seconds):
            self._engine = initialise_deepspeed(
                model,
                self._optimizer,
                settings,
                extra=config.deepspeed.extra,
                device=world.device,
            )
        self._create_optimizer_state()

    @property
    def optimizer_states(self) -> tuple[str, ...]:
        """Names of the optimizer's states, over all parameters."""
        return tuple(dict.fromkeys(state for names in self._states.values() for state in names))

    @property
    def model(self) -> TransformerXL:
        """The model being trained; at stage 3 its weights are sharded over the ranks."""
        return self._engine.module

    @contextmanager
    def whole_model(self) -> Iterator[TransformerXL]:
        """The model with all weights on this rank, without dropout, for evaluation. Collective.

        Inside the context ranks may call it different numbers of times: no forward is collective.
        """
        self.model.eval()
        try:
            yield self.model
        finally:
            self.model.train()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Use the averages in place of the weights, if the run has averages. Collective."""
        if self._config.averaging is None:
            yield
            return
        self._exchange_averages()
        try:
            yield
        finally:
            self._exchange_averages()

    def forward(
        self,
        input_BT: Tensor,
        target_BT: Tensor,
        age_BT: Tensor,
        memory: SequenceState,
        dropout: DropoutMasks,
        num_segments: int = 1,
    ) -> tuple[Tensor, SequenceState]:
        """The model's forward: nats [B, T] of the targets, and the next memory."""
        return self._engine(input_BT, target_BT, age_BT, memory, dropout, num_segments)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Call before `forward`. Gradients are reduced in the backward of the last micro-batch."""
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of one micro-batch's share of the global mean loss."""
        # DeepSpeed averages gradients over ranks, but shares of a global mean have to be summed.
        self._engine.backward(loss * self._world.num_ranks, scale_wrt_gas=False)

    def step(self, lr: float, accept: Accept) -> None:
        """Clip gradients, update weights, clear gradients.

        Every rank calls `accept` with the norm before clipping. If the step is rejected, gradients
        are cleared, and weights, optimizer state and its step count do not change.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        if self._update(accept).is_accepted:
            self._num_updates += 1
            self._update_averages()

    def fragments(self) -> Iterator[Fragment]:
        """The slices this rank saves; over all ranks, every element of every parameter once.

        Of parameters that all ranks hold whole, a share each: they share the writing.
        """
        return self._fragments(self._world.rank, self._world.num_ranks)

    def fragments_to_load(self) -> Iterator[Fragment]:
        """The slices to copy a checkpoint into. Call `finish_loading` after that."""
        return self._fragments(0, 1)

    def _fragments(self, rank: int, num_ranks: int) -> Iterator[Fragment]:
        for name, parameter in self.model.named_parameters():
            owned = self._owned(name, parameter)
            if owned is not None:
                yield from owned
                continue
            size = parameter.numel()
            start, stop = rank * size // num_ranks, (rank + 1) * size // num_ranks
            if start < stop:
                states = self._optimizer.state[parameter] if parameter.requires_grad else {}
                yield self._fragment(
                    name,
                    start,
                    parameter.detach().view(-1)[start:stop],
                    {key: states[key].view(-1)[start:stop] for key in self._states[name]},
                )

    def _owned(self, name: str, parameter: Any) -> list[Fragment] | None:
        """What a rank owns of a sharded parameter; None for one that all ranks hold whole."""
        return None

    def finish_loading(self, *, num_steps: int) -> None:
        """Set the optimizer's step count and update the weights from the loaded fragments."""
        self._num_updates = num_steps
        for state in self._optimizer.state.values():
            state["step"].fill_(num_steps)
        self._refresh_weights()

    def _fragment(
        self, name: str, start: int, master: Tensor, states: dict[str, Tensor]
    ) -> Fragment:
        # A frozen weight is its own average, so that checkpoints have the average of all weights.
        if self._config.averaging is not None:
            states = {AVERAGE: master, **states}
        return Fragment(name, self.shapes[name], start, master, states)

    @abstractmethod
    def _update(self, accept: Accept) -> Decision:
        """Clip and update if the gradient norm is accepted, else clear gradients."""

    def _step_sharded(
        self,
        accept: Accept,
        method: str,
        norm_of: Callable[[Any], Tensor],
        checked: Callable[[Any, Decision], Any],
    ) -> Decision:
        """Let DeepSpeed step, whose `method` computes the norm of the gradients.

        `checked` returns infinity in place of a norm that `accept` rejects: with that, DeepSpeed
        updates nothing.
        """
        decisions: list[Decision] = []

        def judged(result: Any) -> Any:
            decisions.append(accept(norm_of(result)))
            return checked(result, decisions[0])

        with norm_checked_by(self._engine.optimizer, method, judged):
            self._engine.step()
        return decisions[0]

    def _refresh_weights(self) -> None:  # noqa: B027 - stage 0 loads into the weights themselves
        """Copy the fp32 masters into the weights that `forward` uses."""

    def _optimized_tensors(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        """The tensors for which the optimizer holds state, with the names of their states."""
        groups = self._optimizer.param_groups
        return [(p, group["states"]) for group in groups for p in group["params"]]

    def _create_optimizer_state(self) -> None:
        """Create the state as the first step would, so that it can be saved and loaded."""
        for tensor, states in self._optimized_tensors():
            self._optimizer.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                **{key: torch.zeros_like(tensor) for key in states},
            }
            if AVERAGE in states:  # before the first step it is evaluated, if weights were loaded
                self._optimizer.state[tensor][AVERAGE].copy_(tensor.detach())

    def _exchange_averages(self) -> None:
        for master, _ in self._optimized_tensors():
            average = self._optimizer.state[master][AVERAGE]
            weights = master.detach().clone()
            master.detach().copy_(average)
            average.copy_(weights)
        self._refresh_weights()

    def _update_averages(self) -> None:
        if self._config.averaging is None:
            return
        masters = [tensor for tensor, _ in self._optimized_tensors()]
        weight = averaging_weight(self._config, self._num_updates)
        averages = [self._optimizer.state[master][AVERAGE] for master in masters]
        torch._foreach_lerp_(averages, [master.detach() for master in masters], weight)


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


class Stage12Engine(Engine):
    """fp32 masters and optimizer state sharded over the ranks; frozen parameters are whole."""

    def _owned(self, name: str, parameter: Any) -> list[Fragment] | None:
        if not parameter.requires_grad:
            return None
        mapping = parameter._hp_mapping
        if mapping is None:  # the parameter is entirely on other ranks
            return []
        master = mapping.get_hp_fragment().detach()
        if not master.numel():
            return []
        states = {key: mapping.get_optim_state_fragment(key) for key in self._states[name]}
        return [self._fragment(name, mapping.lp_fragment_address.start, master, states)]

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
        return {
            id(group["params"][0]): FlatMatrices(
                [tuple(p.shape) for p in zero.round_robin_bit16_groups[number]],
                zero.round_robin_bit16_offsets[number],
                num_stacked=group["num_stacked"],
                rank=self._world.rank,
                all_gather=self._world.all_gather_parts,
            )
            for number, group in enumerate(self._optimizer.param_groups)
            if group["rule"] != "adam"
        }


class Stage3Engine(Engine):
    """Each rank holds one of `num_ranks` equal parts of each flattened parameter.

    DeepSpeed gathers the weights of a module for its forward and backward, and keeps parameters
    below `stage3_param_persistence_threshold` gathered all the time.
    """

    def __init__(self, model: TransformerXL, config: RunConfig, world: World, **shape: int) -> None:
        # Copied before DeepSpeed replaces the parameters by empty ones and adds its hooks.
        self._meta_model = deepcopy(model).to("meta").eval()
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

    def _owned(self, name: str, parameter: Any) -> list[Fragment]:
        """The rank-th part of the flattened parameter, without the padding at the end."""
        # Masters of small parameters are sharded too, although their weights stay gathered. Frozen
        # weights have none: their shards are what is gathered.
        is_trained = parameter.requires_grad
        part = self._owned_view(parameter) if is_trained else parameter.ds_tensor.detach()
        start = self._world.rank * part.numel()
        size = max(0, min(part.numel(), math.prod(self.shapes[name]) - start))
        states = {key: self._owned_view(parameter, key)[:size] for key in self._states[name]}
        return [self._fragment(name, start, part[:size], states)] if size else []

    def _update(self, accept: Accept) -> Decision:
        # DeepSpeed combines the norms of its groups after this method.
        from deepspeed.runtime.utils import combine_grad_norm_groups

        def checked(norms: list[Tensor], decision: Decision) -> list[Tensor]:
            return norms if decision.is_accepted else [torch.tensor(torch.inf)]

        return self._step_sharded(accept, "_get_norm_groups", combine_grad_norm_groups, checked)

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
