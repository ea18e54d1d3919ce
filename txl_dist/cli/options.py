"""Options and arguments that several commands share. Each is declared once, here."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from txl_dist.cli.paths import checkpoint_path, local_path_parser

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file of one run.", parser=local_path_parser())
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[k.e.y=value ...]", help="Settings that replace those of the file."),
]

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint, a run directory (its newest checkpoint), or a directory that "
        "txl export or txl import wrote.",
        parser=checkpoint_path,
    ),
]
Checkpoints = Annotated[
    list[Path],
    typer.Argument(
        metavar="CHECKPOINT...",
        help="Checkpoints, run directories (their newest checkpoint), or directories that "
        "txl export or txl import wrote.",
        parser=checkpoint_path,
    ),
]
# For commands that need what exported models lack: the manifest, hashes, the state of training.
SavedCheckpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint, or a run directory (its newest checkpoint).",
        parser=checkpoint_path,
    ),
]
EvaluationData = Annotated[
    str,
    typer.Argument(metavar="DATA", help="Directory that txl prepare wrote, or the URL of a copy."),
]
TgtLen = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per segment; default: as in training, or 128 if unknown."),
]
MemLen = Annotated[
    int | None, typer.Option(min=0, help="Tokens of memory; default: as in training.")
]
# Not named Precision: that is the type of the value, in config/run_config.py.
PrecisionOption = Annotated[
    Literal["fp32", "bf16"],
    typer.Option("--precision", help="Precision of matrix products; sums are always fp32."),
]

NumWorkers = Annotated[
    int, typer.Option(min=1, help="Number of processes, or of Ray tasks at a time.")
]
On = Annotated[
    str,
    typer.Option(
        metavar="local|ADDRESS",
        help="Where workers run. local: processes of this machine. ray: a Ray started for this "
        "command. An address: a running Ray cluster, whose nodes must all see the input and the "
        "output directory.",
    ),
]
