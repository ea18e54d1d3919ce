"""Engine: forward, backward and optimizer step of one model on all ranks.

It also knows which slice of each parameter and of its optimizer state this rank owns, so that a
checkpoint can be written and read slice by slice. One subclass per group of ZeRO stages implements
what differs between stages.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from txl_dist.checkpoint.fragments import OPTIMIZER_STATES, Fragment
from txl_dist.config.optimizer_config import OptimizerConfig
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import DivergedError
from txl_dist.model.dropout import DropoutMasks
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.engine.initialise import initialise_deepspeed
from txl_dist.training.engine.settings import deepspeed_settings


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
        )
        self._world = world
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        """Shapes of the whole parameters. At stage 3 the model holds only shards of them."""
        model.to(world.device)
        self._optimizer = _adamw(model, config.optimizer)
        self._engine = initialise_deepspeed(
            model,
            self._optimizer,
            settings,
            extra=config.deepspeed.extra,
            local_rank=world.local_rank,
        )
        # DeepSpeed has created process groups, with torch's timeout of 30 minutes.
        world.set_timeouts(timeout_seconds=config.training.rank_timeout_seconds)
        self._create_optimizer_state()

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

    def forward(
        self,
        input_BT: Tensor,
        target_BT: Tensor,
        age_BT: Tensor,
        memory: Memory,
        dropout: DropoutMasks,
    ) -> tuple[Tensor, Memory]:
        """The model's forward: nats [B, T] of the targets and the next memory."""
        return self._engine(input_BT, target_BT, age_BT, memory, dropout)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Call before `forward`. Gradients are reduced in the backward of the last micro-batch."""
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of one micro-batch's share of the global mean loss."""
        # DeepSpeed averages gradients over ranks, but shares of a global mean have to be summed.
        self._engine.backward(loss * self._world.num_ranks, scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        """Clip gradients, update weights, clear gradients; returns the norm before clipping.

        Raises DivergedError on every rank, with unchanged weights, if the norm is not finite.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = self._update()
        if not math.isfinite(norm):
            raise DivergedError(
                f"the global gradient norm is {norm}; no rank has changed its weights"
            )
        return norm

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """The slices this rank saves; over all ranks, every element of every parameter once."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter, gradient of the elements that `fragments` yields), reduced over ranks.

        Between the backward of the last micro-batch and `step`; not clipped. Not for writing.
        """

    def fragments_to_load(self) -> Iterator[Fragment]:
        """The slices to copy a checkpoint into. Call `finish_loading` after that."""
        return self.fragments()

    def finish_loading(self, *, num_steps: int) -> None:
        """Set the optimizer's step count and update the weights from the loaded fragments."""
        for state in self._optimizer.state.values():
            state["step"].fill_(num_steps)
        self._refresh_weights()

    def _update(self) -> float:
        """Clip and update unless the gradient norm is not finite; returns that norm."""
        self._engine.step()
        # On overflow DeepSpeed skips the update and reports an infinite norm.
        return float(self._engine.get_global_grad_norm())

    def _refresh_weights(self) -> None:  # noqa: B027 - stage 0 loads into the weights themselves
        """Copy the fp32 masters into the weights that `forward` uses."""

    def _optimized_tensors(self) -> list[Tensor]:
        """The tensors for which the optimizer holds state."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _create_optimizer_state(self) -> None:
        """Create AdamW's state as its first step would, so that it can be saved and loaded."""
        for tensor in self._optimized_tensors():
            self._optimizer.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                **{key: torch.zeros_like(tensor) for key in OPTIMIZER_STATES},
            }


def _adamw(model: TransformerXL, config: OptimizerConfig) -> torch.optim.AdamW:
    # torch's AdamW: DeepSpeed's variants compile for about a minute at the first start.
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
