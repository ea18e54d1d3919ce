"""The paper's experiments, and the published files of their corpora.

Both are data (configs/paper/experiments.toml). The files of a corpus are found in the user's
directory in any published form, and compared with the published ones. `reproduce.py` runs them.
"""

import glob
import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from data_pipeline.errors import DataError, printable
from txl_dist.config.named_configs import configs_directory

if TYPE_CHECKING:
    from data_pipeline.shards.manifest import ShardManifest
    from data_pipeline.tokenizers.training import RecipeName

Metric = Literal["perplexity", "bits_per_character"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One form in which the files of a corpus are published."""

    inputs: dict[str, str]
    """Path or pattern by split, below the directory that the user gives, or in the archive. `all`:
    a file that the recipe cuts into splits."""
    files: dict[str, str] = field(default_factory=dict)
    """Name, or names in braces -> published digest (ALGORITHM:HEX, of hashlib); "": not known."""
    archive: str = ""
    """Name or pattern of the archive that has the inputs, without the folder that contains all."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The published files of a corpus, and how they become a dataset."""

    recipe: "RecipeName"
    layouts: tuple[Layout, ...]
    """The first one that is there is used."""
    source: str
    """Where to get the files."""
    format: str = "text"
    tokens: dict[str, int] = field(default_factory=dict)
    """By split, as published, with the line ends of word models; {} if not known."""
    words: int | None = None
    """Of the vocabulary, as published, with the line end; None if not known."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One row of the paper's tables."""

    corpus: Corpus
    metric: Metric
    lengths: dict[Literal["tgt_len", "mem_len", "clamp_len"], int]
    """Of the evaluation; same_length is always on."""
    config: str
    """Name of the config, as in `txl config list`."""
    settings: tuple[str, ...] = ()
    """What the row changes in the config."""
    split: str = "test"
    """Of which the paper's result is."""
    published: float | None = None
    """None: the paper has none."""
    table: str = ""
    ours: str = ""
    """What the paper does not say, so that it was chosen here."""


@dataclass(frozen=True, kw_only=True)
class Experiments:
    """Those that can be run, and the rows of the paper's tables that cannot, with the reason."""

    possible: Mapping[str, Experiment]
    impossible: Mapping[str, str]


@cache
def read_experiments() -> Experiments:
    path = configs_directory() / "paper" / "experiments.toml"
    content = tomllib.loads(path.read_text("utf-8"))
    corpora = {}
    for name, values in content["corpora"].items():
        layouts = tuple(Layout(**layout) for layout in values["layouts"])
        corpora[name] = Corpus(**{**values, "layouts": layouts})
    possible = {}
    for name, values in content["experiments"].items():
        fields = {"config": f"paper/{name}", **values, "corpus": corpora[values["corpus"]]}
        possible[name] = Experiment(**{**fields, "settings": tuple(values.get("settings", ()))})
    return Experiments(possible=possible, impossible=content["impossible"])


def experiments() -> Mapping[str, Experiment]:
    """All experiments that can be run, by name."""
    return read_experiments().possible


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files of one layout of a corpus, in one directory."""

    directory: Path
    layout: Layout

    def files(self, split: str) -> list[Path]:
        """The files that have the split: of an archive, the archive."""
        pattern = self.layout.archive or self.layout.inputs[split]
        return sorted(filter(Path.is_file, self.directory.glob(pattern)))

    def inputs(self) -> list[str]:
        """The inputs of `txl prepare`: SPLIT=PATH, or one path in which it finds the splits."""
        inputs = []
        for split, pattern in self.layout.inputs.items():
            files = self.files(split)
            if self.layout.archive:
                archive = str(files[0])
                path = f"{glob.escape(archive) if '*' in pattern else archive}/{pattern}"
            elif len(files) == 1:
                path = str(files[0])
            else:
                path = f"{glob.escape(str(self.directory))}/{pattern}"
            inputs.append(path if split == "all" else f"{split}={path}")
        return inputs

    def differences(self) -> Iterator[str]:
        """What is not as published: files that are missing, and their digests."""
        from braceexpand import braceexpand

        found = {path.name: path for split in self.layout.inputs for path in self.files(split)}
        digests = {
            name: digest
            for names, digest in self.layout.files.items()
            for name in braceexpand(names)
        }
        if missing := [name for name in digests if name not in found]:
            listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            yield f"{len(missing)} of {len(digests)} files are missing: {listed}"
        for name in filter(found.get, filter(digests.get, digests)):
            algorithm, _, expected = digests[name].partition(":")
            with found[name].open("rb") as file:
                digest = hashlib.file_digest(file, algorithm).hexdigest()
            if digest != expected:
                yield (
                    f"{name} has {algorithm} {digest[:12]}..., the published file has "
                    f"{expected[:12]}..."
                )


def find_published(corpus: Corpus, given: Path) -> FoundFiles:
    """The files of the first layout that is complete in `given`, or in one folder below it.

    `given` can also be one of those files. Raises DataError if there are none, or if several
    folders have them.
    """
    if not given.exists():
        raise DataError(
            f"{printable(str(given))}: there is no such file or directory. --data is the directory "
            f"of the published files of {corpus.source}"
        )
    directory = given.parent if given.is_file() else given
    # Archives may have folders above their files.
    places = [directory, *sorted(path for path in directory.glob("*/") if path.is_dir())]
    shown = printable(str(given))
    for layout in corpus.layouts:
        found = [FoundFiles(place, layout) for place in places]
        complete = [each for each in found if all(map(each.files, layout.inputs))]
        if given.is_file():
            complete = [
                each
                for each in complete
                if any(given in each.files(split) for split in layout.inputs)
            ]
        if len(complete) > 1 and complete[0].directory != directory:
            names = [printable(str(each.directory)) for each in complete]
            raise DataError(
                f"{shown} has files of {corpus.source} in several folders: {', '.join(names)}. "
                f"Give one of them: --data {names[0]}"
            )
        if complete:
            return complete[0]
    forms = (layout.archive or ", ".join(layout.inputs.values()) for layout in corpus.layouts)
    expected = "; or ".join(forms)
    raise DataError(f"{shown} must hold the published files of {corpus.source}: {expected}")


def count_differences(corpus: Corpus, manifest: "ShardManifest") -> Iterator[str]:
    """Tokens and vocabulary that differ from the published ones, in whatever files they came."""
    for split, published in corpus.tokens.items():
        entry = manifest.splits.get(split)
        tokens = entry.tokens if entry else 0
        if tokens != published:
            yield f"{split} has {tokens:,} tokens, the published {published:,}"
    words = manifest.vocab_size - 1  # without the end of a document
    if corpus.words is not None and words != corpus.words:
        yield f"the vocabulary has {words:,} words, the published {corpus.words:,}"
