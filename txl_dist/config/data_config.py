"""Section, the base of all sections, and the section `data`: corpora, and how lanes read them."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

from data_pipeline.system.strict import StrictModel
from txl_dist.config.redaction import redact_field

if TYPE_CHECKING:
    from data_pipeline.streams.order import Ordering  # imports numpy

SINGLE_CORPUS_NAME = "data"
"""Name of the corpus when `data.path` is set instead of `data.mixture`."""

MAX_LANES, MIN_SEGMENTS = 512, 16
"""Most lanes that were measured; fewest segments of a lane per epoch."""


def expand_home(path: Any) -> Any:
    """A path as text, with `~` expanded as by a shell; anything else as it is."""
    # Path.expanduser raises an error for `~NAME` of no user, and changes URLs.
    return os.path.expanduser(path) if isinstance(path, str | Path) else path  # noqa: PTH111


PathText = Annotated[str, BeforeValidator(expand_home)]
"""Text, because a config is YAML. In Python a pathlib.Path can be given."""


class Section(StrictModel):
    """Frozen; no unknown keys, no conversion between types except from int to float."""

    model_config = ConfigDict(regex_engine="python-re")  # for patterns with look-ahead

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        # Logs and tracebacks show the repr of a config, which may hold a server's password.
        return [(name, redact_field(name or "", value)) for name, value in super().__repr_args__()]


Check = tuple[bool, str]
"""Whether something is wrong, and the message about it."""


def refuse(*checks: Check) -> None:
    """Raise ValueError if anything is wrong. `config_file.py` splits the lines of its message."""
    if text := "\n".join(message for is_wrong, message in checks if is_wrong):
        raise ValueError(text)


class CorpusConfig(Section):
    """One corpus of a mixture."""

    path: PathText
    """Directory that `txl prepare` wrote."""
    weight: float = Field(gt=0)
    """The corpus provides weight / (sum of all weights) of the tokens read."""


CorpusName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")]
"""Without dots: `data.mixture.NAME.weight=2` must be a valid override."""


TRAIN_SPLIT = "train"
"""The split of every corpus that a run trains on."""


class DataConfig(Section):
    """The dataset or datasets, and how lanes read them. Set either `path` or `mixture`."""

    # `mixture` comes first, because the validator of `path` needs its value.
    mixture: dict[CorpusName, CorpusConfig] | None = Field(default=None, min_length=1)
    """Several corpora with the same tokenizer, e.g. `{web: {path: data/web, weight: 3}, ...}`."""
    path: PathText | None = Field(default=None, validate_default=True)
    """Directory that `txl prepare` wrote, relative to the working directory; or the URL of one."""
    num_lanes: int = Field(default=16, ge=1, lt=2**63)
    """Streams of text, each with its memory: the rows of the global batch, unless `lanes_per_step`
    is set. Does not depend on the number of ranks, which share the lanes."""
    lanes_per_step: int | None = Field(default=None, ge=1, lt=2**63)
    """Rows of the global batch: the lanes that one step reads, in turns. null: all of `num_lanes`,
    which must be a multiple. With turns, successive steps read other documents."""
    tgt_len: int = Field(default=128, ge=1, lt=2**63)
    """Tokens of each of its lanes in a step: one segment, or `training.backprop_segments` of
    them."""
    reset: Literal["document", "stream"] = "document"
    """`document`: no token sees another document. `stream`: memory continues into the next one, as
    in the paper; for documents whose order has a meaning, such as chapters."""
    shuffle: Literal["blocks", "none"] = "blocks"
    """`blocks`: shuffle blocks of whole documents, each epoch in another order, and the documents
    inside each block, except with `reset: stream`. `none`: the corpus in order, cut into one
    contiguous part per lane, as in the paper's code."""
    piece_len: int | None = Field(default=None, ge=2)
    """Cut the text into pieces of so many tokens and shuffle them: a lane reads a piece, then
    another one elsewhere, without memory of the one before. Pieces of `tgt_len` tokens are what
    others call random windows; in longer ones the memory works. null: lanes read documents."""

    @field_validator("path")
    @classmethod
    def _require_path_or_mixture(cls, path: str | None, info: ValidationInfo) -> str | None:
        mixture = info.data.get("mixture", ...)  # Absent if it is invalid, which is reported.
        if path is None and mixture is None:
            raise ValueError(
                "is missing; set it to a directory that txl prepare wrote, or set data.mixture"
            )
        if path is not None and mixture is not None and mixture is not ...:
            raise ValueError("is set, but so is data.mixture; set one of them to null")
        return path

    @property
    def rows(self) -> int:
        """Lanes that a step reads, on all ranks."""
        return self.lanes_per_step or self.num_lanes

    @property
    def rows_setting(self) -> str:
        """The setting that `rows` comes from."""
        return "data.lanes_per_step" if self.lanes_per_step else "data.num_lanes"

    @property
    def num_turns(self) -> int:
        """Steps in which every lane is read once."""
        return self.num_lanes // self.rows

    @property
    def tokens_per_step(self) -> int:
        """Of all lanes that a step reads."""
        return self.rows * self.tgt_len

    @property
    def ordering(self) -> "Ordering":
        """The order in which lanes read, from `shuffle`, `reset` and `piece_len`."""
        from data_pipeline.streams.order import Ordering

        # A memory that continues would otherwise be that of an unrelated document.
        continues = self.reset == "stream" and self.shuffle == "blocks"
        return Ordering.named("whole_blocks" if continues else self.shuffle, self.piece_len)

    @property
    def corpora(self) -> dict[str, CorpusConfig]:
        """All corpora by name; `path` counts as a mixture of one."""
        return self.mixture or {SINGLE_CORPUS_NAME: CorpusConfig(path=self.path or "", weight=1.0)}


def lanes_for(num_tokens: int | None, *, rows: int, tgt_len: int) -> tuple[int, int]:
    """The best known `num_lanes` and `lanes_per_step` for training data of `num_tokens`.

    As many lanes as have MIN_SEGMENTS segments of `tgt_len` tokens, at most MAX_LANES, in turns of
    `rows`. More lanes are more documents in a short run; shorter lanes begin too often in the
    middle of a document, without its memory. None: the number of tokens is unknown, but large.
    """
    fitting = MAX_LANES if num_tokens is None else num_tokens // (MIN_SEGMENTS * tgt_len)
    lanes = min(max(fitting, 1), MAX_LANES)
    rows = min(rows, lanes)
    return lanes - lanes % rows, rows
