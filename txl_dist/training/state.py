"""TrainState: the progress of a run, stored as plain JSON in a checkpoint's manifest (`state`).

Tensors (weights, optimizer state, memory) are stored separately. No random state is needed: dropout
masks follow from seed, step and lane (`dropout.py`), the order of tokens from seed and epoch
(`data_pipeline/streams/order.py`).

`DivergenceState` decides whether a step has diverged. The inputs are sums and norms over all ranks
and the state is the same on every rank, so all ranks decide the same without a further collective,
before any of them updates its weights. `recovery.py` acts on the decision.
"""

import json
import math
from typing import Self

import numpy as np
from pydantic import ValidationError

from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.strict import StrictModel, first_problem
from txl_dist.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, Count, Sha256
from txl_dist.config.training_config import EVENT_STEPS, DivergenceConfig
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.scores import LossSums
from txl_dist.training.phases import Phase
from txl_dist.training.scores import StepScore

MIN_RELATIVE_DEVIATION = 0.01
"""Smallest deviation, relative to the median: a window of equal losses must not make every small
change a spike."""


class DivergenceState(StrictModel):
    """State that the divergence check and the response to events need; part of TrainState."""

    losses: tuple[float, ...] = ()
    """Nats per token of the last accepted steps; empty unless `loss_spike` is set."""
    gradient_norms: tuple[float, ...] = ()
    """Gradient norms of the last accepted steps; empty unless `gradient_spike` is set."""
    memory_valid: tuple[float, ...] = ()
    """Shares of the memory that these steps could read (`StepResult.memory_valid`)."""
    event_steps: tuple[Count, ...] = ()
    """Steps of the latest events, in the order in which they happened."""
    skip_steps: tuple[Count, ...] = ()
    """Steps that a rollback has excluded: no rank computes them, now or after a resume."""
    num_rollbacks: Count = 0

    def find_event(
        self,
        config: DivergenceConfig,
        *,
        step: int,
        sums: LossSums,
        gradient_norm: float,
        memory_valid: float,
    ) -> str | None:
        """Why step number `step` has diverged; None if it may update the weights."""
        if not math.isfinite(sums.nats):
            return f"the loss of step {step} is {sums.nats}"
        if not math.isfinite(gradient_norm):
            return f"the global gradient norm of step {step} is {gradient_norm}"
        # After a gap, and where lanes begin, there is no memory, so the loss is higher.
        if self.memory_valid and memory_valid < float(np.median(self.memory_valid)) / 2:
            return None
        # A segment of one token has no target.
        loss = sums.nats_per_token if sums.num_tokens else -math.inf
        for name, value, window, setting in (
            ("loss", loss, self.losses, "loss_spike"),
            ("global gradient norm", gradient_norm, self.gradient_norms, "gradient_spike"),
        ):
            threshold = getattr(config, setting)
            limit = _limit(window, threshold, config.window_steps)
            if value > limit:
                return (
                    f"the {name} of step {step} is {value:.6g}, a spike above {limit:.6g} "
                    f"(divergence.{setting}={threshold:g})"
                )
        return None

    def with_accepted(
        self, config: DivergenceConfig, *, sums: LossSums, gradient_norm: float, memory_valid: float
    ) -> Self:
        """The state after an accepted step. A window is empty while its threshold is not set: its
        values would be old when it is.
        """
        is_on = config.loss_spike is not None, config.gradient_spike is not None
        losses = (*self.losses, sums.nats_per_token) if sums.num_tokens else self.losses
        windows = {
            "losses": losses if is_on[0] else (),
            "gradient_norms": (*self.gradient_norms, gradient_norm) if is_on[1] else (),
            "memory_valid": (*self.memory_valid, memory_valid) if any(is_on) else (),
        }
        size = config.window_steps
        return self.model_copy(update={name: kept[-size:] for name, kept in windows.items()})

    def for_other_text(self, *, after: int) -> Self:
        """If steps from `after` on read other text or other numbers of tokens: their losses cannot
        be compared with earlier ones, and those that a rollback has excluded are not the same.
        """
        windows: dict[str, tuple[float, ...]] = dict.fromkeys(
            ("losses", "gradient_norms", "memory_valid"), ()
        )
        skip_steps = tuple(step for step in self.skip_steps if step <= after)
        return self.model_copy(update={**windows, "skip_steps": skip_steps})

    def with_event(self, *, step: int) -> Self:
        """The state after an event; those before the last EVENT_STEPS are dropped."""
        recent = tuple(other for other in self.event_steps if other > step - EVENT_STEPS)
        return self.model_copy(update={"event_steps": (*recent, step)})

    def last_update(self, step: int) -> int:
        """The last step up to `step` that updated the weights."""
        # Events of step numbers that were trained again after a rollback are in `skip_steps` too.
        without_update = {*self.event_steps, *self.skip_steps}
        while step in without_update:
            step -= 1
        return step


class LastUpdate(StrictModel):
    """What the step line says about the last step that updated the weights."""

    step: Count
    gradient_norm: float
    memory_valid: float


class Origin(StrictModel):
    """The stored model from whose weights a run started (`init_from`)."""

    path: str
    digest: Sha256
    """`StoredModel.digest`, as in the results of `txl eval`."""

    def __str__(self) -> str:
        return f"{self.path} (sha256 {self.digest})"


class TrainState(StrictModel):
    """The progress of a run after a step."""

    step: Count = 0
    """Steps done, including skipped ones."""
    skipped_steps: Count = 0
    """Steps without an update of the weights. The optimizer has counted the others only."""
    position: Count = 0
    """Lane position of the next segment."""
    turn: Count = 0
    """Which part of the lanes reads next there (`data.lanes_per_step`); 0 if all do."""
    tokens: Count = 0
    """Targets trained on, over all lanes."""
    best: StepScore | None = None
    """The best score when the checkpoint was saved; None in a run that trains (`scores.py`)."""
    unreported: tuple[float, Count, int] = (0.0, 0, 0)
    """LossSums since the last line of metrics.jsonl."""
    unreported_steps: Count = 0
    last_update: LastUpdate | None = None
    phases: tuple[Phase, ...] = ()
    """In order; the last one is the current one."""
    contiguous_from: Count = 0
    """No token from this lane position on may attend to tokens before it: steps between them were
    skipped, so the memory of the lanes does not end where the text continues."""
    divergence: DivergenceState = DivergenceState()
    forked_from: str | None = None
    """The checkpoint of another run where this run began: PATH of `--resume PATH`, absolute."""
    origin: Origin | None = None

    @property
    def unreported_sums(self) -> LossSums:
        return LossSums(*self.unreported)


def load_state(path: DatasetPath, manifest: CheckpointManifest) -> TrainState:
    """The state in the manifest of checkpoint `path`. Raises CheckpointError if it is invalid."""
    try:
        # From JSON text: in strict mode only JSON input may give a tuple as a list.
        return TrainState.model_validate_json(json.dumps(manifest.state))
    except ValidationError as error:
        raise CheckpointError(
            f"{path / MANIFEST_NAME}: state.{first_problem(error)}. The checkpoint was written by "
            f"{manifest.written_by}; resume with that version, or choose another checkpoint"
        ) from None


def _limit(window: tuple[float, ...], threshold: float | None, window_steps: int) -> float:
    """The largest value that is no spike (`DivergenceConfig`); infinity without a threshold or a
    full window. Unlike mean and standard deviation, median and median absolute deviation do not
    change much when a few values of the window are large.
    """
    if threshold is None or len(window) < window_steps:
        return math.inf
    values = np.asarray(window[-window_steps:])
    median = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - median)))
    return median + threshold * max(deviation, MIN_RELATIVE_DEVIATION * abs(median))
