"""The files of a corpus in the user's directory, and how they differ from the published ones."""

import glob
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import printable
from data_pipeline.shards.manifest import ShardManifest
from txl_dist.errors import DataError
from txl_dist.reproduction.experiments import Corpus, Layout


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
        if missing := [name for name in self.layout.files if name not in found]:
            listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            yield f"{len(missing)} of {len(self.layout.files)} files are missing: {listed}"
        for name, published in self.layout.files.items():
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
