"""Runs whose checkpoints are copied to an S3 store of this machine."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from data_pipeline.system import sources
from tests.data_pipeline.conftest import bucket, s3_server  # noqa: F401 - fixtures
from tests.support.training_runs import NO_EVALUATION
from txl_dist.checkpoint import copies
from txl_dist.errors import DataError
from txl_dist.runtime.world import World
from txl_dist.training.loop import Trainer

URL = "s3://bucket/runs/one"
SETTINGS = (
    NO_EVALUATION,
    f"training.checkpoint_url={URL}",
    "training.checkpoint_interval_steps=5",
)


@pytest.fixture
def aws(s3_server: ThreadedMotoServer, bucket: Any) -> dict[str, str]:  # noqa: F811
    """The environment in which the ranks find the store."""
    fail_fast = {"AWS_MAX_ATTEMPTS": "1"}
    return {k: v for k, v in os.environ.items() if k.startswith("AWS_")} | fail_fast


def in_cloud(world: World, aws: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(world, *args)` with the store, and without long waits between retries."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws.items():
            patch.setenv(name, value)
        patch.setattr(sources, "_FIRST_WAIT_SECONDS", 0.01)
        patch.setattr(copies, "RETRY_SECONDS", 0.2)
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        return function(world, *args)


def remote_steps(store: Any) -> list[int]:
    store.invalidate_cache()
    manifests = store.glob("bucket/runs/one/checkpoints/*/manifest.json")
    return sorted(int(path.split("/")[-2][5:13]) for path in manifests)


def die_after(trainer: Trainer, step: int) -> None:
    """End the run with an error of the data after a step, as soon as its checkpoint is copied."""
    read = trainer.batches.read

    def failing() -> Any:
        if trainer.state.step < step:
            return read()
        trainer.saver.finish(require_copies=True)
        raise DataError("the machine is gone")

    trainer.batches.read = failing  # type: ignore[method-assign]
