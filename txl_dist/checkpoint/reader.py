"""Verifies a checkpoint and reads slices of it; every rank reads only what it needs.

The number of ranks, the ZeRO stage and the micro-batch size may differ from the run that wrote it,
because slices are located by parameter and range, and memory by lane.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_pipeline.tokenizers import Tokenizer, load_tokenizer
from txl_dist.checkpoint.directory import find_damage, reading
from txl_dist.checkpoint.manifest import (
    TOKENIZER_NAME,
    CheckpointManifest,
    Kind,
    file_name,
    lane_key,
    load_checkpoint_manifest,
)
from txl_dist.checkpoint.snapshot import AVERAGE, Fragment
from txl_dist.errors import CheckpointError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

Weights = Literal["auto", "averaged", "last"]
"""Which weights to load: the average over steps, those of the last step, or the average if any."""


def verify_checkpoint(directory: Path, *, kinds: Sequence[str] = ()) -> CheckpointManifest:
    """Hash all files, or those whose name starts with one of `kinds`; returns the manifest.

    Raises CheckpointError listing every damaged file.
    """
    with reading(directory):
        manifest = load_checkpoint_manifest(directory)
        names = [name for name in manifest.files if not kinds or name.startswith(tuple(kinds))]
        damage = find_damage(directory, manifest, names)
    if damage:
        raise CheckpointError(
            f"{directory} is damaged: {'; '.join(damage)}. Use another checkpoint: "
            f"txl checkpoint list {directory.parent.parent}"
        )
    return manifest


def load_model(
    directory: Path, *, config: ModelConfig | None = None, weights: Weights = "auto"
) -> tuple[TransformerXL, Tokenizer, CheckpointManifest]:
    """The model in evaluation mode, on the CPU, with its tokenizer.

    `config` may differ from the saved one in fields that affect no weights (mem_len, clamp_len,
    same_length, attention). Verifies the weights first; raises CheckpointError, also if averaged
    weights are wanted and there are none.
    """
    with reading(directory):
        manifest = load_checkpoint_manifest(directory)
        averaged = chosen_weights(directory, manifest, weights) == "averaged"
        kinds = ("optimizer" if averaged else "weights", "tokenizer")
        manifest = verify_checkpoint(directory, kinds=kinds)
        model = TransformerXL(config or manifest.architecture)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        check_parameters(directory, manifest, shapes)
        slices, state = _Slices(directory, manifest), AVERAGE if averaged else None
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.view(-1).copy_(slices.range(name, 0, parameter.numel(), state))
        tokenizer = load_tokenizer(directory / TOKENIZER_NAME)
    return model.eval(), tokenizer, manifest


def chosen_weights(
    directory: Path, manifest: CheckpointManifest, weights: Weights
) -> Literal["averaged", "last"]:
    """The weights that `load_model` loads. Raises CheckpointError if there are none such."""
    has_average = AVERAGE in manifest.optimizer_states
    if weights == "averaged" and not has_average:
        raise CheckpointError(
            f"{directory} has no averaged weights: the run had optimizer.averaging=null. Leave the "
            "option out to use the weights of the last step"
        )
    return "averaged" if has_average and weights != "last" else "last"


def load_fragments(
    directory: Path, manifest: CheckpointManifest, fragments: Iterable[Fragment]
) -> None:
    """Copy weights and optimizer state into `fragments`, whichever ranks wrote them.

    The files must have been verified, also by `check_parameters`.
    """
    slices = _Slices(directory, manifest)
    with torch.no_grad():
        for fragment in fragments:
            span = (fragment.name, fragment.start, fragment.stop)
            fragment.master.copy_(slices.range(*span))
            for state, tensor in fragment.states.items():
                tensor.copy_(slices.range(*span, state))


def load_memory(
    directory: Path, manifest: CheckpointManifest, lanes: Iterable[int]
) -> dict[int, dict[str, Tensor]]:
    """Lane -> tensors of its memory by name, for the given lanes."""
    slices = _Slices(directory, manifest)
    return {lane: slices.memory(lane) for lane in lanes}


def check_parameters(
    directory: Path, manifest: CheckpointManifest, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises CheckpointError naming the parameters whose shapes differ from `expected`."""
    saved = {name: entry.shape for name, entry in manifest.parameters.items()}
    differing = [
        f"{name}: checkpoint {saved.get(name, 'none')}, model {expected.get(name, 'none')}"
        for name in sorted(expected.keys() | saved.keys())
        if expected.get(name) != saved.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"{directory} is a checkpoint of another model: {'; '.join(differing[:8])}"
            f"{f' and {len(differing) - 8} more' if len(differing) > 8 else ''}. Start a new run, "
            "or restore the model's options from RUN/config.yaml"
        )


class _Slices:
    """Reads ranges of parameters, and memories of lanes, from a checkpoint's files."""

    def __init__(self, directory: Path, manifest: CheckpointManifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._open: dict[str, safe_open] = {}

    def range(self, name: str, start: int, stop: int, state: str | None = None) -> Tensor:
        """Elements [start, stop) of a flattened parameter, or of a state of it; fp32."""
        kind: Kind = "optimizer" if state else "weights"
        key = f"{name}/{state}" if state else name
        parts = []
        for part in self._manifest.parameters[name].slices:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                file = self._file(file_name(kind, part.rank))
                # get_slice reads only these bytes, not the whole tensor.
                try:
                    parts.append(file.get_slice(key)[low - part.start : high - part.start])
                except SafetensorError:
                    raise CheckpointError(
                        f"{self._directory / file_name(kind, part.rank)} has no {key}: it was "
                        "written with another optimizer, or by another version of txl"
                    ) from None
        return torch.cat(parts)

    def memory(self, lane: int) -> dict[str, Tensor]:
        file = self._file(file_name("memory", self._manifest.rank_of_lane[lane]))
        prefix = lane_key(lane)
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}

    def _file(self, name: str) -> safe_open:
        # Opened once per checkpoint and memory-mapped; a rank opens only the files it needs.
        if name not in self._open:
            try:
                self._open[name] = safe_open(self._directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._directory / name} cannot be read: {error}") from None
        return self._open[name]
