"""The bare starts on Ray that `start_time.py` compares with `txl train --on ray`.

    python benchmarks/bare_ray_start.py PROGRAM RANKS train     Ray Train
    python benchmarks/bare_ray_start.py PROGRAM RANKS actors    actors in a placement group

Both start a private Ray as `txl train` does, and call the function `step` of PROGRAM
(bare_step.py) on every rank. The difference between the two is what Ray Train's
controller takes (docs/decisions/0041-started-in-seconds.md).
"""

import os
import runpy
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from cluster.connection import ray_connection

STEPPED = "stepped"
"""A file that appears after the first step of a rank."""


def main() -> None:
    """Read the command line and run."""
    program, num_ranks, kind = str(Path(sys.argv[1]).resolve()), int(sys.argv[2]), sys.argv[3]
    start = {"train": _ray_train, "actors": _ray_actors}[kind]
    with tempfile.TemporaryDirectory(prefix="txl-bench-") as name:
        folder = Path(name)
        threading.Thread(target=_print_first_step, args=(folder,), daemon=True).start()
        with ray_connection(None, num_cpus=max(num_ranks, os.cpu_count() or 1)):
            start({"program": program, "folder": name}, num_ranks)


def _print_first_step(folder: Path) -> None:
    """Print when a rank has done its step, before Ray ends the ranks."""
    while not (folder / STEPPED).exists():
        time.sleep(0.05)
    print("step 1 | loss", flush=True)


def _ray_train(settings: dict[str, str], num_ranks: int) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        _step,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=num_ranks),
        run_config=RunConfig(storage_path=settings["folder"]),
    ).fit()


def _ray_actors(settings: dict[str, str], num_ranks: int) -> None:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}] * num_ranks, strategy="PACK")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    strategy = PlacementGroupSchedulingStrategy(placement_group=group)
    actor = ray.remote(num_cpus=1, scheduling_strategy=strategy)(_RankActor)
    ranks = [actor.remote(rank, num_ranks, port) for rank in range(num_ranks)]
    ray.get([rank.step.remote(settings) for rank in ranks])


class _RankActor:
    def __init__(self, rank: int, num_ranks: int, port: int) -> None:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }

    def step(self, settings: dict[str, str]) -> None:
        _step(settings)


def _step(settings: dict[str, str]) -> None:
    runpy.run_path(settings["program"])["step"]()
    (Path(settings["folder"]) / STEPPED).touch()


if __name__ == "__main__":
    main()
