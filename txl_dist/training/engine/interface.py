"""Engine: forward, backward and optimizer step of one model on all ranks.

It also knows which slice of each parameter and of its optimizer state this rank owns, so that a
checkpoint can be written and read slice by slice. One subclass per group of ZeRO stages implements
what differs between stages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_dist.checkpoint.tensors import AVERAGE, Fragment
from txl_dist.config.run_config import RunConfig
from txl_dist.model.dropout import DropoutMasks
from txl_dist.model.memory import SequenceState
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.engine.deepspeed_setup import (
    deepspeed_settings,
    initialise_deepspeed,
    norm_checked_by,
)
from txl_dist.training.engine.optimizers import averaging_weight, create_optimizer, states_by_name


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
        self._states = dict(states_by_name(model, self._optimizer.param_groups))
        """Names of the optimizer states of each parameter."""
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
        """The model with all weights on this rank, for evaluation. Collective.

        Inside the context ranks may call it different numbers of times: no forward is collective.
        """
        yield self.model

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
        """The model's forward: nats [B, T] of the targets and the next memory."""
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

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """The slices this rank saves; over all ranks, every element of every parameter once."""

    def fragments_to_load(self) -> Iterator[Fragment]:
        """The slices to copy a checkpoint into. Call `finish_loading` after that."""
        return self.fragments()

    def finish_loading(self, *, num_steps: int) -> None:
        """Set the optimizer's step count and update the weights from the loaded fragments."""
        self._num_updates = num_steps
        for state in self._optimizer.state.values():
            state["step"].fill_(num_steps)
        self._refresh_weights()

    def _share(self, name: str, parameter: Tensor) -> Iterator[Fragment]:
        """The part that this rank saves of a parameter that every rank holds whole."""
        rank, num_ranks, size = self._world.rank, self._world.num_ranks, parameter.numel()
        start, stop = rank * size // num_ranks, (rank + 1) * size // num_ranks
        if start < stop:
            yield self._slice(name, parameter, start, stop)

    def _slice(self, name: str, parameter: Tensor, start: int, stop: int) -> Fragment:
        """Of a parameter that is whole on this rank, as its optimizer states are."""
        states = self._optimizer.state[parameter] if parameter.requires_grad else {}
        return self._fragment(
            name,
            start,
            parameter.detach().view(-1)[start:stop],
            {key: states[key].view(-1)[start:stop] for key in self._states[name]},
        )

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
