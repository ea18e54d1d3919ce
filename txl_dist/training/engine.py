"""Engine: DeepSpeed ZeRO around the model; the only module that imports deepspeed.

It turns losses into an optimizer step and knows which slice of every parameter and optimizer state
this rank owns, so that a checkpoint can be written and read slice by slice. The traps avoided here
are listed, measured, in docs/decisions/0003-deepspeed-by-its-fragments.md.
"""

import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from txl_dist.checkpoint.fragments import OPTIMIZER_STATES, Fragment
from txl_dist.config.run_config import OptimizerConfig, RunConfig
from txl_dist.errors import DivergedError
from txl_dist.model.dropout import DropoutMasks
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.deepspeed_settings import deepspeed_settings, refusals_explained


class Engine:
    """Forward, backward and step of one model on all ranks."""

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
        self._stage = config.deepspeed.zero_stage
        self._world = world
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        """Of the whole parameters; at stage 3 the model itself holds only parts of them."""
        self._hollow = deepcopy(model).to("meta") if self._stage == 3 else None
        model.to(world.device)
        self._optimizer = _adamw(model, config.optimizer)
        os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # DeepSpeed insists
        with refusals_explained(config.deepspeed.extra):
            self._engine = _initialise_deepspeed(model, self._optimizer, settings)
        world.limit_waits(timeout_seconds=config.training.rank_timeout_seconds)
        self._fill_optimizer_state()

    @property
    def model(self) -> TransformerXL:
        """The model as it is trained; at stage 3 its weights are spread over the ranks."""
        return self._engine.module

    @contextmanager
    def whole_model(self) -> Iterator[TransformerXL]:
        """The model with all weights on this rank, for evaluation; all ranks enter together.

        Inside, ranks may run it as often as they like: no forward waits for another rank.
        """
        if self._stage < 3:
            yield self.model
            return
        import deepspeed

        # DeepSpeed's hooks would let go of gathered weights; the twin has none, and shares them.
        assert self._hollow is not None
        twin = deepcopy(self._hollow)
        with deepspeed.zero.GatheredParameters(self.model.parameters()):
            weights = {name: p.detach() for name, p in self.model.named_parameters()}
            twin.load_state_dict(weights, assign=True)
            yield twin

    def forward(
        self,
        input_BT: Tensor,
        target_BT: Tensor,
        age_BT: Tensor,
        memory: Memory,
        dropout_masks: DropoutMasks,
    ) -> tuple[Tensor, Memory]:
        """The model's forward: nats [B, T] of the targets and the next memory."""
        return self._engine(input_BT, target_BT, age_BT, memory, dropout_masks)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Before `forward`; after the step's last micro-batch gradients are reduced."""
        self._engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of one micro-batch's share of the global mean loss."""
        # DeepSpeed averages over ranks; a share of a global mean has to be summed.
        self._engine.backward(loss * self._world.num_ranks, scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        """Clip, update, clear; returns the global gradient norm before clipping.

        Raises DivergedError on every rank, with the weights as they were, if it is not finite.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._stage == 0:
            norm = self._full_gradient_norm()
            _require_finite(norm)
            self._engine.step()
            return norm
        self._engine.step()
        # On overflow DeepSpeed reports infinity and has left the weights alone.
        norm = float(self._engine.get_global_grad_norm())
        _require_finite(norm)
        return norm

    def _full_gradient_norm(self) -> float:
        """Stage 0: gradients are whole and reduced on every rank, but DeepSpeed gives no norm."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))

    def fragments(self) -> Iterator[Fragment]:
        """What this rank owns of every parameter; over all ranks, everything exactly once."""
        find = {0: self._whole, 3: self._partition}.get(self._stage, _mapped)
        for name, parameter in self.model.named_parameters():
            fragment = find(name, parameter)
            if fragment is not None and fragment.master.numel():
                yield fragment

    def _whole(self, name: str, parameter: Tensor) -> Fragment:
        """Stage 0: every rank has everything, so the ranks share out the writing."""
        rank, num_ranks, size = self._world.rank, self._world.num_ranks, parameter.numel()
        start, stop = rank * size // num_ranks, (rank + 1) * size // num_ranks
        state = self._optimizer.state[parameter]
        return Fragment(
            name,
            tuple(parameter.shape),
            start,
            parameter.detach().view(-1)[start:stop],
            {key: state[key].view(-1)[start:stop] for key in OPTIMIZER_STATES},
        )

    def _whole_parameters(self) -> Iterator[Fragment]:
        """Stage 0 only: whole tensors to load into, because every rank keeps a full copy."""
        for name, parameter in self.model.named_parameters():
            state = self._optimizer.state[parameter]
            states = {key: state[key].view(-1) for key in OPTIMIZER_STATES}
            yield Fragment(name, tuple(parameter.shape), 0, parameter.detach().view(-1), states)

    def _partition(self, name: str, parameter: Any) -> Fragment:
        """Stage 3: the rank-th of equal parts of the flattened parameter, less the last's padding.

        Parameters too small to be worth spreading are whole on every rank, but their masters are
        spread like the others.
        """
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        shape = self.shapes[name]
        part = safe_get_local_fp32_param(parameter).detach()
        start = self._world.rank * part.numel()
        owned = slice(0, max(0, min(part.numel(), math.prod(shape) - start)))
        states = {
            key: safe_get_local_optimizer_state(parameter, key)[owned] for key in OPTIMIZER_STATES
        }
        return Fragment(name, shape, start, part[owned], states)

    def fragments_to_load(self) -> Iterator[Fragment]:
        """Where a checkpoint is to be copied to; `loaded` must follow."""
        return self._whole_parameters() if self._stage == 0 else self.fragments()

    def loaded(self, *, num_steps: int) -> None:
        """After copying into `fragments_to_load`: set the optimizer's step, refresh the weights."""
        for state in self._optimizer.state.values():
            state["step"].fill_(num_steps)
        if self._stage == 3:
            # Private and pinned: as DeepSpeed's own step does, from masters to partitions. Weights
            # that are gathered just now, the small ones always, are let go first.
            self._engine.empty_partition_cache()
            for group in range(len(self._engine.optimizer.fp32_partitioned_groups_flat)):
                self._engine.optimizer._reassign_or_swap_out_partitioned_parameters(group)
        elif self._stage > 0:
            self._engine.optimizer.update_lp_params()

    def _fill_optimizer_state(self) -> None:
        """Create AdamW's state now, as its first step would, so that it can be saved and loaded."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if self._stage == 3:  # DeepSpeed puts them into the groups during its step only
            parameters = self._engine.optimizer.fp32_partitioned_groups_flat
        for parameter in parameters:
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{key: torch.zeros_like(parameter) for key in OPTIMIZER_STATES},
            }
        if self._stage in (1, 2):
            # Private and pinned to this version: links each parameter to its slice of the state.
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()


def _mapped(name: str, parameter: Any) -> Fragment | None:
    """Stages 1 and 2: DeepSpeed's own record of the slice; none where this rank owns nothing."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    return Fragment(
        name,
        tuple(parameter.shape),
        mapping.lp_fragment_address.start,
        mapping.get_hp_fragment().detach(),
        {key: mapping.get_optim_state_fragment(key) for key in OPTIMIZER_STATES},
    )


def _adamw(model: TransformerXL, config: OptimizerConfig) -> torch.optim.AdamW:
    # torch's own: DeepSpeed's variants compile for a minute at the first start.
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _initialise_deepspeed(
    model: TransformerXL, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with _without_mlflow():
        import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # At stage 3 torch would tell of DeepSpeed's old names for collectives several times a step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # The shared-memory op would be compiled at every start and is never used in training.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


@contextmanager
def _without_mlflow() -> Iterator[None]:
    """DeepSpeed's autotuner, never used here, imports MLflow if it can, which takes 2 seconds."""
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # import raises ModuleNotFoundError
    try:
        yield
    finally:
        del sys.modules["mlflow"]


def _require_finite(norm: float) -> None:
    if not norm < float("inf"):
        raise DivergedError(f"the global gradient norm is {norm}; no rank has changed its weights")
