"""`txl prepare`: turn input files into a dataset of shards."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_pipeline.errors import ConfigError, printable
from data_pipeline.system.sources import local_path
from txl_dist.cli.data import print_totals, totals
from txl_dist.cli.options import (
    MIB,
    AsJson,
    NumWorkers,
    On,
    note,
    open_workers,
    path_argument,
    require_local,
    stoppable,
    work_progress,
)

if TYPE_CHECKING:
    from data_pipeline.preparation.prepare import PrepareReport
    from data_pipeline.shards.manifest import PrepareSettings
    from data_pipeline.tokenizers.ids import IdTokenizer

_MIB = 2**20


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files (also .gz, .zst, .bz2, .xz), folders, archives (.zip, .tar, .tar.gz, ...), "
            "parts of archives ('a.zip/train/*'), patterns ('data/**/*.jsonl', 's-{00..99}.tar') "
            "and URLs (s3, gs, http, https); or all with their splits: train=A valid=B test=C.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Output directory: new, empty, or that of an interrupted run.",
            parser=path_argument,
        ),
    ],
    *,
    format: Annotated[
        str,
        typer.Option(
            help="auto (by suffix and content of each file; .json must hold JSON lines), or one of "
            "text, lines, blank_lines, jsonl, parquet, wikitext, tar, arrow, csv, ids. "
            "tar reads the samples of a WebDataset, every other format the files of an archive."
        ),
    ] = "auto",
    text_key: Annotated[
        str | None,
        typer.Option(
            help="Key of the text in a JSON line, or column in Parquet. Default: text; ids with "
            "--format ids."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="byte|char|word|bpe|PATH",
            help="Kind of tokenizer, or a tokenizer.json, such as that of a dataset or checkpoint. "
            "Default: that of --recipe, or byte. One of token ids implies --format ids, and gives "
            "size, end-of-document id and names.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Conventions and tokenizer of a dataset of the paper: wt103, wt2, ptb, lm1b "
            "(words), or enwik8, text8 (one document with fixed splits)."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of ids. Default for bpe: 32768, else none. With --format ids: "
            "the number of ids."
        ),
    ] = None,
    end_of_document: Annotated[
        str | None,
        typer.Option(
            metavar="ID|NAME",
            help="--format ids: the id that begins documents, and separates them in arrays.",
        ),
    ] = None,
    padding: Annotated[
        str | None,
        typer.Option(
            metavar="ID|NAME",
            help="--format ids: the id that fills up rows of different lengths. It is dropped.",
        ),
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="--format ids: JSON with the names of the ids, for text that people read.",
            parser=path_argument,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="--format ids: type of the integers in raw .bin files, such as uint16."),
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            metavar="NAME=FRACTION,...|none",
            help="Fractions to hold out, such as valid=0.01,test=0.01. The rest is train. Default: "
            "the splits in the names of files and folders (train, valid, test, ...); none merges "
            "them.",
        ),
    ] = "",
    split_by: Annotated[
        str | None,
        typer.Option(
            metavar="document|file|position",
            help="--split keeps these together. Default: documents, and the parts of one work in a "
            "file. position: cut the only document, held-out parts at its end.",
        ),
    ] = None,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Shuffle the documents with this seed.")
    ] = None,
    max_reject_rate: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Fraction of records that may be unusable. 1 also allows broken files.",
        ),
    ] = 0.001,
    dedup: Annotated[
        str,
        typer.Option(
            help="none, or exact: keep the first of documents with the same text, and remove from "
            "train what held-out splits of the input have."
        ),
    ] = "none",
    shard_size: Annotated[
        int, typer.Option(metavar="MIB", max=2**20, help="Maximum MiB of text per shard.")
    ] = 64,
    workers: NumWorkers = 1,
    on: On = "processes",
    as_json: AsJson = False,
) -> None:
    """Turn input files into checksummed shards. The same input and options give the same bytes for
    any number of workers. If the command is stopped, run it again to continue.

    Example: txl prepare books/ --out data/books --split valid=0.01,test=0.01 --shuffle 1

    Example: txl prepare train=wiki.train.txt valid=wiki.valid.txt --out data/wiki

    Example: txl prepare enwik8.zip --out data/enwik8 --recipe enwik8
    """
    vocabulary = _vocabulary_of_ids(tokenizer) if format in ("auto", "ids") else None
    if vocabulary:
        format, vocab_size = "ids", _only("--vocab-size", vocab_size, vocabulary.vocab_size)
        tokenizer, names = "ids", names or Path(str(tokenizer))
    is_ids = format == "ids"
    given_ids = is_ids and tokenizer == "ids"
    tokenizer_file = None if tokenizer is None or given_ids else _tokenizer_file(tokenizer)
    if names and not is_ids:
        raise ConfigError("--names is for --format ids; omit it")
    end_id = _id_of("--end-of-document", end_of_document, names)
    if vocabulary:
        end_id = _only("--end-of-document", end_id, vocabulary.end_of_document)
    settings = _settings(
        format=format,
        text_key=text_key,
        tokenizer=tokenizer if tokenizer_file is None else "file",
        recipe=recipe,
        vocab_size=32768 if tokenizer == "bpe" and vocab_size is None else vocab_size,
        end_of_document=end_id,
        padding=_id_of("--padding", padding, names),
        dtype=dtype,
        split=_fractions("" if split == "none" else split),
        merge_splits=split == "none",
        split_by=split_by,
        shuffle=shuffle,
        dedup=dedup,
        shard_bytes=shard_size * _MIB,
    )
    from data_pipeline.preparation.prepare import prepare_dataset

    advice = (
        f"no dataset was written. Finished work is kept in {out}: run the same command to continue"
    )
    with (
        stoppable(advice),
        open_workers(on, workers) as pool,
        work_progress(MIB, pool) as progress,
    ):
        report = prepare_dataset(
            inputs if on == "processes" else [_absolute(source) for source in inputs],
            out,
            settings,
            tokenizer_file=names or tokenizer_file,
            max_reject_rate=max_reject_rate,
            workers=pool,
            progress=progress,
            note=note,
        )
    (_print_json if as_json else _print_report)(out, report)


def _print_json(out: Path, report: "PrepareReport") -> None:
    counts = ("workers", "units", "reused_units", "peak_memory_bytes", "seconds")
    content = {
        "status": _status(report),
        **{name: getattr(report, name) for name in counts},
        "formats": {kind: sum(files.values()) for kind, files in report.read_as.items()},
        **{name: getattr(report, name) for name in ("read_as", "given_splits", "ignored")},
    }
    print(json.dumps({**content, **totals(out, report.manifest)}))


def _print_report(out: Path, report: "PrepareReport") -> None:
    from data_pipeline.preparation.prepare import list_read_as

    reused = f", {report.reused_units} of {report.units} units reused" * bool(report.reused_units)
    print(
        f"{printable(str(out))}: {_status(report)} in {report.seconds:,.1f} s{reused}; "
        f"at most {report.peak_memory_bytes / _MIB:,.0f} MiB per process"
    )
    print_totals(report.manifest)
    print(f"  read {list_read_as(report.read_as)}")
    if report.ignored:
        counts = (f"{n} {printable(suffix)}" for suffix, n in sorted(report.ignored.items()))
        print(f"ignored: {', '.join(counts)}", file=sys.stderr)
    if rejected := report.manifest.input.rejected:
        rejects = printable(str(out / "rejects.jsonl"))
        print(f"{rejected} records could not be used: {rejects}", file=sys.stderr)


def _status(report: "PrepareReport") -> str:
    return "already complete" if report.already_complete else "complete"


def _fractions(split: str) -> dict[str, float]:
    """Parse `valid=0.01,test=0.01`."""
    parts = [part.partition("=") for part in split.split(",") if part]
    try:
        fractions = {name.strip(): float(number) for name, _, number in parts}
    except ValueError:
        message = f"--split {split!r}: expected NAME=FRACTION, such as valid=0.01,test=0.01"
        raise ConfigError(message) from None
    if len(fractions) < len(parts):
        raise ConfigError(f"--split {split!r} has a name twice")
    return fractions


def _tokenizer_file(tokenizer: str) -> Path | None:
    """The file of `--tokenizer PATH`, or None for a kind of tokenizer."""
    if tokenizer in ("byte", "char", "word", "bpe"):
        return None
    path = Path(require_local(tokenizer))
    if not path.is_file() and not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"--tokenizer {tokenizer!r} is neither byte, char, word or bpe nor a file. Give one of "
            "these, the path of a tokenizer.json, or the directory of a model."
        )
    return path


def _vocabulary_of_ids(tokenizer: str | None) -> "IdTokenizer | None":
    """The vocabulary in the file of `--tokenizer`; None if this is no file, or one for text."""
    from data_pipeline.tokenizers.ids import IdTokenizer
    from data_pipeline.tokenizers.loading import read_description, tokenizer_of

    path = None if tokenizer in (None, "ids") else _tokenizer_file(tokenizer)
    if path is None or path.is_dir():
        return None
    content = read_description(path)
    if not isinstance(content, dict) or content.get("type") != "ids":
        return None
    loaded = tokenizer_of(content, source=str(path))
    assert isinstance(loaded, IdTokenizer)
    return loaded


def _id_of(option: str, value: str | None, names: Path | None) -> int | None:
    """The id of an option that is an id or one of the names in the file."""
    from data_pipeline.tokenizers.ids import read_names

    by_name = {name: id_ for id_, name in read_names(names).items()} if names else {}
    if value is None:
        return None
    if value in by_name:
        return by_name[value]
    if re.fullmatch("[0-9]{1,10}", value):
        return int(value)
    hint = "" if names else "; give --names for names"
    raise ConfigError(f"{option} {value!r} is no token id, and no name of one{hint}")


def _only(option: str, value: int | None, expected: int) -> int:
    """The value that the file of `--tokenizer` fixes. Raises ConfigError for another one."""
    if value not in (None, expected):
        raise ConfigError(f"{option} {value}: the file of --tokenizer has {expected}; omit it")
    return expected


def _settings(**values: Any) -> "PrepareSettings":
    """Validate the options. Raises ConfigError with the name of the wrong option."""
    from pydantic import ValidationError

    from data_pipeline.shards.manifest import PrepareSettings

    try:
        # The defaults depend on the format and the recipe.
        return PrepareSettings(**{k: value for k, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        # Validators of one field set `loc`; validators of the model write "FIELD: reason".
        reason = first["msg"].removeprefix("Value error, ")
        field = str(first["loc"][0]) if first["loc"] else reason.partition(": ")[0]
        reason = reason.removeprefix(f"{field}: ")
        option = {"shard_bytes": "shard-size"}.get(field, field.replace("_", "-"))
        value = "" if values.get(field) is None else f" {values[field]!r}"
        raise ConfigError(
            f"--{option}{value}: {reason}. See txl prepare --help for what is supported."
        ) from None


def _absolute(argument: str) -> str:
    """Make a local path absolute: workers of a cluster have another working directory."""
    from data_pipeline.readers.addresses import parse_input

    split, address = parse_input(argument)
    local = local_path(address)
    name = f"{split}=" if split else ""
    return name + (address if local is None else str(Path(local).absolute()))
