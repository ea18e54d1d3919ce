"""Every txl command of documents, config headers, deployment files and `--help` can be run.

It is parsed by the command line itself. The settings of a preparation and the config of a run are
validated as the command does it.
"""

import contextlib
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer.main

from data_pipeline.preparation import prepare as preparation
from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer
from tests.support.documents import (
    ROOT,
    DocumentedCommand,
    documented_commands,
    leaf_commands,
    mentioned_commands,
    parse,
)
from txl_dist.cli import prepare as prepare_command
from txl_dist.cli.app import app
from txl_dist.cli.reproduce import experiments
from txl_dist.config.config_file import load_run_config, named_configs
from txl_dist.config.run_config import RunConfig

COMMANDS = [*documented_commands()]
CONFIGS = [*(ROOT / "configs").glob("*/*.yaml"), *(ROOT / "configs").glob("*.yaml")]


class StopError(Exception):
    """Raised instead of preparing a dataset."""


def settings_of(
    command: DocumentedCommand, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> PrepareSettings:
    """The settings with which a `txl prepare` would start."""
    planned: list[PrepareSettings] = []

    def stop(inputs: Sequence[str], out: Path, settings: PrepareSettings, **options: Any) -> None:
        planned.append(settings)
        raise StopError

    monkeypatch.setattr(preparation, "prepare_dataset", stop)
    monkeypatch.setattr(prepare_command, "open_workers", lambda *_: contextlib.nullcontext())
    monkeypatch.chdir(directory)
    _, parameters = parse(command.words)
    files = {"tokenizer": ByteTokenizer().to_json(), "names": "{}"}
    for option, content in files.items():
        if str(parameters[option]).endswith(".json"):
            path = directory / parameters[option]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    tokenizer = parameters["tokenizer"]
    if tokenizer and tokenizer not in ("byte", "char", "word", "bpe") and "." not in tokenizer:
        (directory / tokenizer).mkdir()  # a model of transformers
        (directory / tokenizer / "tokenizer.json").write_text("{}")
    with contextlib.suppress(StopError):
        prepare_command.prepare(**parameters)
    (settings,) = planned
    return settings


def config_of(command: DocumentedCommand) -> tuple[Path, RunConfig] | None:
    """The config of a `txl train` or `estimate`, if it is one of this repository."""
    _, parameters = parse(command.words)
    given = str(parameters["config"]).removeprefix("/opt/txl/")  # the images have them there
    path = named_configs().get(given) or ROOT / given
    if not path.is_relative_to(ROOT / "configs"):
        return None
    return path, load_run_config(path, parameters["overrides"] or [])


def test_commands_are_found_in_every_kind_of_place() -> None:
    places = {command.place for command in COMMANDS}
    for expected in (
        "README.md", "configs/README.md", "docs/how_to/run_on_a_cluster.md",
        "configs/paper/lm1b-base.yaml", "configs/cluster/wt103-cloud.yaml",
        "cluster/deploy/kuberay/prepare.yaml", "help of prepare",
    ):  # fmt: skip
        assert expected in places
    long = next(c for c in COMMANDS if c.place == "configs/paper/lm1b-base.yaml")
    assert long.words[-2:] == ("--out", "data/lm1b"), "its lines are joined"


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_documented_command_can_be_parsed_and_its_settings_are_valid(
    command: DocumentedCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, parameters = parse(command.words)
    if name == "prepare":
        settings_of(command, monkeypatch, tmp_path)
    elif name in ("train", "estimate"):
        config_of(command)
    elif name == "reproduce":
        assert parameters["list_"] or parameters["name"] in experiments()


def test_commands_in_sentences_exist_with_their_options() -> None:
    commands = leaf_commands(typer.main.get_command(app))
    groups = {name.split()[0] for name in commands if " " in name}
    mentioned = [*mentioned_commands()]
    assert len(mentioned) > 100
    for mention in mentioned:
        words = [*takewhile(lambda word: word != "--", mention.words[1:])]
        if words[0] in groups and len(words) == 1:
            continue
        command = commands.get(" ".join(words[:2])) or commands.get(words[0])
        assert command, mention
        options = {name for parameter in command.params for name in parameter.opts}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options, mention


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_header_fit_the_config_and_each_other(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is prepared is what the run reads, and the evaluation reads the run and its data."""
    config = load_run_config(path)
    for command in COMMANDS:
        if command.place != str(path.relative_to(ROOT)):
            continue
        name, parameters = parse(command.words)
        if name == "prepare":
            assert str(parameters["out"]) == str(config.data.path)
            if parameters["recipe"]:
                rows = experiments()
                experiment = rows.get(path.stem) or rows[f"{parameters['recipe']}-base"]
                settings = settings_of(command, monkeypatch, tmp_path)
                assert settings.format == experiment.corpus.format
                assert settings == PrepareSettings(
                    recipe=experiment.corpus.recipe, format=experiment.corpus.format
                )
        elif name == "train":
            assert config_of(command) is not None
            assert ROOT / parameters["config"] == path
        elif name == "eval":
            assert [str(each) for each in parameters["checkpoints"]] == [config.directory]
            assert parameters["data"] == str(config.data.path)
            if path.parent.name == "paper":
                experiment = experiments()[path.stem]
                assert parameters["split"] == experiment.split
                assert parameters["same_length"]
                for option in ("tgt_len", "mem_len", "clamp_len"):
                    assert parameters[option] == experiment.lengths.get(option)
        else:
            assert name == "config show" or parameters["name"] == path.stem


def test_configs_that_deployment_files_and_how_tos_name_are_valid() -> None:
    texts = [(path, path.read_text()) for path in (ROOT / "cluster" / "deploy").rglob("*.yaml")]
    texts += [(path, path.read_text()) for path in CONFIGS]
    texts += [(path, path.read_text()) for path in (ROOT / "docs" / "how_to").glob("*.md")]
    named = {name for _, text in texts for name in re.findall(r"\bconfigs/[\w/-]+\.yaml", text)}
    assert "configs/cluster/wt103-two-hosts.yaml" in named
    for name in named:
        load_run_config(ROOT / name)
