"""How well `txl estimate` predicts the memory of a rank: estimate against real steps.

    python benchmarks/estimate_accuracy.py [--ranks 1,2]

Each row runs three steps of a small model on real gloo ranks, and compares the estimate for
CPUs with the largest sum of the bytes of all tensors alive on one rank. Fails if a row is
off by more than 10 %.
"""

import argparse
import os
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

LIMIT = 0.10
SIZES: dict[str, dict[str, Any]] = {
    # What dominates: the activations, the weights and states, the logits of a large vocabulary.
    "activations": {"num_lanes": 4, "tgt_len": 64, "mem_len": 64, "vocab_size": 2000},
    "states": {"num_lanes": 4, "tgt_len": 4, "mem_len": 4, "vocab_size": 2000},
    "logits": {"num_lanes": 4, "tgt_len": 32, "mem_len": 32, "vocab_size": 30000},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"precision": "bf16"},
    "recompute": {"training": {"activation_checkpointing": True}},
    "micro-batches": {"training": {"micro_batch_lanes": 1}},
    "average": {"optimizer": {"averaging": "asgd"}},
    "dropout": {"model": {"dropout": 0.1, "dropatt": 0.1}},
    "clusters": {"model": {"cutoffs": (200, 800), "div_val": 2}},
    "muon": {"optimizer": {"name": "muon"}},
    "frozen": {"optimizer": {"lr_factors": {"hidden": 0, "other": 0}}},
}
STAGES_OF = {"bf16": (1, 2, 3), "muon": (0, 1, 2)}
"""Where an option is not possible at all stages."""
BUCKET_SIZE = 1_000_000
"""DeepSpeed's buffer, in elements. Its default of 2 GB would hide every error of these models."""


def main() -> None:
    """Print the table; exit 1 if a row exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2")
    worst = 0.0
    print("size         option         stage ranks  measured  estimate ratio")
    for num_ranks in map(int, parser.parse_args().ranks.split(",")):
        for case, peak in zip(cases(), measure(num_ranks), strict=True):
            size, option, stage = case
            ratio = estimate(build(*case), num_ranks) / peak
            worst = max(worst, abs(ratio - 1))
            mark = "  !" if abs(ratio - 1) > LIMIT else ""
            print(
                f"{size:<12} {option:<14} {stage:>5} {num_ranks:>5} {peak / 1e6:>6.1f} MB "
                f"{ratio * peak / 1e6:>6.1f} MB {ratio:.3f}{mark}",
                flush=True,
            )
    print(f"largest error {worst:.1%}, limit {LIMIT:.0%}")
    sys.exit(worst > LIMIT)


def cases() -> list[tuple[str, str, int]]:
    """(size, option, stage) of every row."""
    return [
        (size, option, stage)
        for size in SIZES
        for option in OPTIONS
        for stage in STAGES_OF.get(option, (0, 1, 2, 3))
        if option == "" or size == "activations"
    ]


def build(size: str, option: str, stage: int) -> Any:
    """The RunConfig of a row."""
    from txl_dist.config.run_config import RunConfig

    shape, options = SIZES[size], OPTIONS[option]
    model = {
        "n_layer": 4, "d_model": 128, "n_head": 4, "d_head": 32, "d_inner": 512,
        "mem_len": shape["mem_len"], "vocab_size": shape["vocab_size"],
    }  # fmt: skip
    zero = {"reduce_bucket_size": BUCKET_SIZE}
    return RunConfig.model_validate(
        {
            "directory": "run",
            "precision": options.get("precision", "fp32"),
            "data": {"path": "data", "num_lanes": shape["num_lanes"], "tgt_len": shape["tgt_len"]},
            "model": {**model, **options.get("model", {})},
            "optimizer": options.get("optimizer", {}),
            "training": {"num_steps": 10, **options.get("training", {})},
            "deepspeed": {
                "zero_stage": stage,
                "extra": {"zero_optimization": zero},
                **options.get("deepspeed", {}),
            },
        }
    )


def estimate(config: Any, num_ranks: int) -> int:
    """Bytes of tensors on one rank."""
    from txl_dist.estimate.run_estimate import estimate_run

    run = estimate_run(config, gpus=num_ranks, peak_tflops=1, device="cpu")
    return run.stages[config.deepspeed.zero_stage].device


def measure(num_ranks: int) -> list[int]:
    """The peak of every case, on the one of new processes that needs most."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(num_ranks, mp_context=get_context("spawn")) as pool:
        ranks = [pool.submit(measure_rank, rank, num_ranks, port) for rank in range(num_ranks)]
        peaks = [rank.result() for rank in ranks]
    return [max(of_ranks) for of_ranks in zip(*peaks, strict=True)]


def measure_rank(rank: int, num_ranks: int, port: int) -> list[int]:
    """One rank of all cases."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    from tests.support.measured_steps import measure_steps
    from txl_dist.runtime.world import World

    world = World(rank, num_ranks, rank)
    world.join(timeout_seconds=60)
    return [measure_steps(build(*case), world).peak_bytes for case in cases()]


if __name__ == "__main__":
    main()
