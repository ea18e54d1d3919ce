"""`txl report`: one HTML page about a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from txl_dist.cli.options import AsJson, local_path_parser


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory.", parser=local_path_parser())
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: RUN/report.html.", parser=local_path_parser()),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about a run: curves, evaluations, speed, wall time, events, config.

    The page needs no other file. The run may be in progress.

    Example: txl report runs/quickstart
    """
    from data_pipeline.system.files import write_file
    from txl_dist.analysis.run_report import read_run, run_page
    from txl_dist.errors import ConfigError

    record = read_run(run)
    path = out or run / "report.html"
    try:
        write_file(path, run_page(record).encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Give another place: --out FILE"
        ) from None
    if as_json:
        print(json.dumps({"run": str(run), "report": str(path), "step": record.last["step"]}))
    else:
        print(f"wrote {path}; open it in a browser")
