"""A training run of one rank in the process of a script, which can watch its parts."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from txl_dist.config.config_file import load_run_config
from txl_dist.runtime.process import keep_freed_memory
from txl_dist.runtime.world import World
from txl_dist.training.loop import Trainer
from txl_dist.training.rank import build_trainer
from txl_dist.training.spec import RunDirectory, TrainSpec
from txl_dist.training.start import Start


def prepare_email(out: Path) -> Path:
    """A small dataset: a package of the standard library."""
    source = Path(sysconfig.get_paths()["stdlib"]) / "email"
    prepare_dataset([source], out, PrepareSettings())
    return out


@contextmanager
def one_rank(config: Path, overrides: Sequence[str]) -> Iterator[Trainer]:
    """The trainer of a run that has not begun."""
    keep_freed_memory()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    spec = TrainSpec(config=load_run_config(config, [*overrides]))
    directory = RunDirectory(spec.run_path)
    directory.create()
    with ExitStack() as stack:
        yield build_trainer(Start.open(spec, World(0, 1), directory, stack))
