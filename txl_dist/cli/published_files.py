"""The paper's experiments (configs/paper/experiments.toml), and the files of their corpora.

`txl reproduce` finds the files in the user's directory, and says how they differ from the published
ones.
"""

import glob
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from braceexpand import braceexpand
from pydantic import Field

from data_pipeline.errors import printable
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.system.strict import StrictModel
from data_pipeline.tokenizers.recipes import RecipeName
from txl_dist.errors import ConfigError, DataError

CONFIGS = Path(__file__).parents[2] / "configs" / "paper"
EXPERIMENTS_NAME = "experiments.toml"


class PublishedFile(StrictModel):
    """A file as it was published. What is not known is None, and not compared."""

    size: int | None = None
    """Bytes."""
    digest: str | None = None
    """ALGORITHM:HEX, of hashlib."""


class Layout(StrictModel):
    """One way in which the files of a corpus are published."""

    inputs: dict[str, str]
    """Path or pattern by split, below the directory that the user gives."""
    files: dict[str, PublishedFile] = Field(default={})
    """By name or by names in braces; {} if the files differ from place to place."""

    @property
    def files_by_name(self) -> dict[str, PublishedFile]:
        return {name: file for names, file in self.files.items() for name in braceexpand(names)}


class Corpus(StrictModel):
    """The published files of a corpus, and how they become a dataset."""

    recipe: RecipeName
    format: str = "text"
    layouts: tuple[Layout, ...]
    """The first one that is there is used. With the recipe's fixed splits, it has only train."""
    tokens: dict[str, int] = Field(default={})
    """By split, as published, with the line ends of word models; {} if not known."""
    words: int | None = None
    """Of the vocabulary, as published, with the line end; None if not known."""
    source: str
    """Where to get the files."""


class Experiment(StrictModel):
    """One row of the paper's tables."""

    corpus: Corpus
    metric: Literal["perplexity", "bits_per_character"]
    published: float | None = None
    """On the test split; None: the paper has none."""
    table: str = ""
    lengths: dict[Literal["tgt_len", "mem_len", "clamp_len"], int]
    """Of the evaluation; same_length is always on."""


@cache
def experiments() -> Mapping[str, Experiment]:
    """All experiments by name. Raises ConfigError if their file is not there."""
    path = CONFIGS / EXPERIMENTS_NAME
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: the configs are part of the repository, not of the "
            "installed package. Install txl from a clone: pip install -e ."
        )
    content = tomllib.loads(path.read_text("utf-8"))
    # As JSON, because only there strict mode accepts lists for tuples.
    return {
        name: Experiment.model_validate_json(
            json.dumps({**values, "corpus": content["corpora"][values["corpus"]]})
        )
        for name, values in content["experiments"].items()
    }


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files of one layout of a corpus, in one directory."""

    directory: Path
    layout: Layout

    def files(self, split: str) -> list[Path]:
        return sorted(self.directory.glob(self.layout.inputs[split]))

    @property
    def is_complete(self) -> bool:
        return all(self.files(split) for split in self.layout.inputs)

    def inputs(self) -> list[str]:
        """The inputs of `txl prepare`: SPLIT=PATH, or one path if the recipe has fixed splits."""
        paths = {
            split: f"{glob.escape(str(self.directory))}/{pattern}"
            if "*" in pattern
            else str(self.directory / pattern)
            for split, pattern in self.layout.inputs.items()
        }
        return (
            [f"{split}={path}" for split, path in paths.items()]
            if len(paths) > 1
            else [*paths.values()]
        )

    def differences(self) -> Iterator[str]:
        """What is not as published: files that are missing, their sizes and digests."""
        found = {path.name: path for split in self.layout.inputs for path in self.files(split)}
        files = self.layout.files_by_name
        if missing := [name for name in files if name not in found]:
            listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            yield f"{len(missing)} of {len(files)} files are missing: {listed}"
        for name, published in files.items():
            if name not in found:
                continue
            size = found[name].stat().st_size
            if published.size is not None and size != published.size:
                yield f"{name} has {size:,} bytes, the published file has {published.size:,}"
            elif published.digest is not None:
                algorithm, _, expected = published.digest.partition(":")
                with found[name].open("rb") as file:
                    digest = hashlib.file_digest(file, algorithm).hexdigest()
                if digest != expected:
                    digests = f"{digest[:12]}..., the published file has {expected[:12]}..."
                    yield f"{name} has {algorithm} {digests}"


def find_published(corpus: Corpus, directory: Path) -> FoundFiles:
    """The files of the first layout that is complete in `directory`, or in one folder below it.

    Raises DataError if there is none, or if several folders have one.
    """
    # Archives may have a folder above their files.
    folders = sorted(path for path in directory.glob("*/") if path.is_dir())
    for layout in corpus.layouts:
        for places in ([directory], folders):
            found = [FoundFiles(place, layout) for place in places]
            complete = [each for each in found if each.is_complete]
            if len(complete) > 1:
                names = ", ".join(printable(str(each.directory)) for each in complete)
                raise DataError(
                    f"{printable(str(directory))} has files of {corpus.source} in several folders: "
                    f"{names}. Give one of them: --data {printable(str(complete[0].directory))}"
                )
            if complete:
                return complete[0]
    expected = "; or ".join(", ".join(layout.inputs.values()) for layout in corpus.layouts)
    raise DataError(
        f"{printable(str(directory))} must hold the published files of {corpus.source}, unpacked: "
        f"{expected}"
    )


def count_differences(corpus: Corpus, manifest: ShardManifest) -> Iterator[str]:
    """Tokens and vocabulary that differ from the published ones, in whatever files they came."""
    for split, published in corpus.tokens.items():
        tokens = manifest.splits[split].tokens
        if tokens != published:
            yield f"{split} has {tokens:,} tokens, the published {published:,}"
    words = manifest.vocab_size - 1  # without the end of a document
    if corpus.words is not None and words != corpus.words:
        yield f"the vocabulary has {words:,} words, the published {corpus.words:,}"
