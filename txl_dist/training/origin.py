"""The origin of a run: the stored model from whose weights a new run starts (`init_from`).

    load_run_config    the config of a run; what it leaves out of `model` is that of the origin
    find_origin        the model, checked against config and data
    load_weights       into the model to train, before the engine of any ZeRO stage takes it over

A run starts from the weights only: with step 0, empty memories and a new optimizer state. It saves
a checkpoint and evaluates before the first step. Once there is a checkpoint, the origin is not read
again, and may be gone: its settings are those of the newest checkpoint.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from data_pipeline.system.remote_path import RemotePath
from txl_dist.checkpoint.copies import CheckpointCopies
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.manifest import CheckpointManifest
from txl_dist.config import config_file
from txl_dist.config.data_config import expand_home
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig

if TYPE_CHECKING:  # a config without `init_from` is loaded without torch
    from txl_dist.convert.stored_model import StoredModel
    from txl_dist.model.transformer_xl import TransformerXL
    from txl_dist.runtime.world import World
    from txl_dist.training.data import TrainingData
    from txl_dist.training.spec import TrainSpec

_OF_READING = ("same_length", "clamp_len", "init_std", "proj_init_std")
"""Settings of a model that change no weights, besides those that may change in a run."""
LONGEST_MEMORY = 16_384
"""A longer memory is not taken from the model without a word: the config must give its length."""
NO_FORK = ("auto", "never")
"""The values of `--resume` that are no checkpoint of another run."""


def load_run_config(
    path: str | Path, overrides: Sequence[str] = (), *, resume: str = "auto"
) -> RunConfig:
    """`config_file.load_run_config`, with the settings of the model of `init_from`.

    `resume`: as in TrainSpec. Raises CheckpointError if the model cannot be read, and ConfigError
    that lists all settings which contradict it.
    """
    complete = partial(_with_model_of_origin, resume=resume)
    return config_file.load_run_config(path, overrides, complete=complete)


def _with_model_of_origin(settings: dict[str, Any], *, resume: str) -> dict[str, Any]:
    """The settings of a config file, with those of `model` that it leaves out."""
    init_from, given = settings.get("init_from"), settings.get("model") or {}
    if not isinstance(init_from, str) or not isinstance(given, dict):
        return settings
    source = expand_home(init_from if resume in NO_FORK else resume)
    name, trained = _model_of_origin(source, settings)
    if "mem_len" not in given and trained.mem_len > LONGEST_MEMORY:
        raise ConfigError(
            f"the model of {name} has mem_len={trained.mem_len}, and so many tokens would be kept "
            "per lane and layer: choose a memory, for example model.mem_len=1024"
        )
    stored = json.loads(json.dumps(asdict(trained)))  # with lists, like the file
    del stored["recipe"]  # the optimizer depends on it
    completed = {**stored, **given, "vocab_size": given.get("vocab_size") or trained.vocab_size}
    # An invalid setting is left to the checks of every config, which name its line.
    with suppress(ValidationError):
        model = TypeAdapter(ModelConfig).validate_json(json.dumps(completed), strict=True)
        require_same_model(name, trained, model)
    return {**settings, "model": completed}


def _model_of_origin(path: str, settings: dict[str, Any]) -> tuple[str, ModelConfig]:
    """The model, and where it was found. Of a run with checkpoints, that of the newest one."""
    directory, training = expand_home(settings.get("directory")), settings.get("training")
    url = training.get("checkpoint_url") if isinstance(training, dict) else None
    if isinstance(directory, str) and (manifest := newest_of_run(Path(directory), url)):
        return f"the checkpoint of step {manifest.step} of {directory}", manifest.architecture
    from txl_dist.convert.stored_model import find_model  # imports torch

    if isinstance(directory, str) and Path(directory).resolve() == Path(path).resolve():
        raise ConfigError(
            f"init_from={path} is the directory of the run: its files would lie between those of "
            "the model. Give the run a directory of its own"
        )
    try:
        return path, find_model(path).config
    except CheckpointError as error:
        raise CheckpointError(
            f"init_from: {error}. It can be a run, a checkpoint, or a directory of txl import, txl "
            "export or transformers; download a model of a hub first"
        ) from None


def newest_of_run(run: Path, url: str | None) -> CheckpointManifest | None:
    """The newest readable checkpoint of a run, in its directory or at its URL; None without one."""
    if (manifest := CheckpointDirectory(run).newest_manifest()) is None and url:
        copies = CheckpointCopies(RemotePath(url))
        with suppress(OSError, CheckpointError):  # the ranks say what is wrong with it
            manifest = copies.newest_manifest(names) if (names := copies.complete()) else None
    return manifest


def require_same_model(name: str, trained: ModelConfig, model: ModelConfig) -> None:
    """Raise ConfigError unless `model` has the weights of `trained`, and the same function of them
    if it is read in the same way. The error has all settings that differ.
    """
    from txl_dist.training.compatibility import may_differ  # imports numpy

    fixed = {"vocab_size", *(["clamp_len"] if trained.encoding.needs_clamp_len else [])}
    settings = asdict(model)
    wrong = [
        f"\n  model.{key}={settings[key]!r}, and the model has {value!r}"
        for key, value in asdict(trained).items()
        if value != settings[key]
        and (key in fixed or not (key in _OF_READING or may_differ(f"model.{key}")))
    ]
    if wrong:
        raise ConfigError(
            f"the config is not that of the weights of {name}:{''.join(wrong)}\nRemove these "
            "settings: what a config leaves out of `model` is that of the weights"
        )


def check_origin(spec: "TrainSpec", data: "TrainingData") -> None:
    """Before the ranks are started: `find_origin`, for a run that has no checkpoint."""
    config = spec.config
    if config.init_from is None or spec.resume not in NO_FORK:
        return
    if newest_of_run(config.run_path, config.training.checkpoint_url) is None:
        _checked(config.init_from, data)


def _checked(path: str | Path, data: "TrainingData") -> "StoredModel":
    """The model at `path`, whose token ids have the meaning that they have in the data."""
    from txl_dist.convert.stored_model import find_model  # imports torch

    stored = find_model(path)
    stored.check_data(data.vocabulary, data.corpora[0].directory)
    require_same_model(str(stored.path), stored.config, data.model_config)
    return stored


def find_origin(config: RunConfig, data: "TrainingData", world: "World") -> "StoredModel | None":
    """The model from whose weights a new run starts; None without `init_from`. Collective.

    Raises CheckpointError if it cannot be read or is not the same on all ranks, DataError if the
    data has another tokenizer, ConfigError if the config is not that of its weights.
    """
    if config.init_from is None:
        return None
    init_from: str | Path = config.init_from
    found: list[StoredModel] = []

    def find() -> tuple[Path, str]:
        if not found:
            found.append(_checked(init_from, data))
        return found[0].path, found[0].digest

    # From rank 0 first: a run that still trains may save another checkpoint meanwhile.
    paths = world.run_on_all(lambda: find()[0] if world.is_rank_zero else None)
    init_from = paths[0] or init_from
    digests = [digest for _, digest in world.run_on_all(find)]

    if len(set(digests)) > 1:
        listed = ", ".join(f"rank {rank} {digest[:16]}" for rank, digest in enumerate(digests))
        raise CheckpointError(
            f"the ranks find different models in {init_from} (sha256: {listed}). Copy the same "
            "files to all machines, or use a storage that they share"
        )
    return found[0]


def load_weights(origin: "StoredModel", model: "TransformerXL", world: "World") -> None:
    """Replace the weights of `model`. Collective. Raises CheckpointError for damaged files."""

    def load() -> None:
        loaded, _ = origin.load(model.config)
        model.load_state_dict(loaded.state_dict())

    world.run_on_all(load)
