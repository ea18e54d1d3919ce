"""How well `collective_times.py` predicts a step over a slow link: two ranks on two hosts.

    sudo python -m benchmarks.shaped_link [--mbit 400,200,100] [--repeats 2]

`scaling_limits.py` computes with the same functions. The hosts are network namespaces with one rank
each, and the kernel's token bucket filter limits what each of them sends (`tc tbf`). The time of
computation is that of the same steps without a limit. Communication is predicted from the sizes of
the parameters, the rate, and the headers of TCP, IP and Ethernet. On CPUs nothing overlaps, so the
two add up. Measured seconds are medians over the steps of all repeats; the rates alternate.

Fails if a prediction is off by more than 15 %.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.collective_times import Collective, Links, collectives_of_step
from tests.support.hosts import Host, two_hosts
from tests.support.measured_steps import measure_steps
from txl_dist.config.run_config import RunConfig
from txl_dist.estimate.dry_run import dry_run
from txl_dist.estimate.rank_bytes import ZeroSettings
from txl_dist.runtime.world import World

LIMIT = 0.15
STAGES = (0, 1, 2, 3)
MICRO_BATCHES = 2
PORT = "29431"
LATENCY_SECONDS = 1e-4
PAYLOAD_SHARE = 1448 / 1514
"""Bytes of data in an Ethernet frame of TCP with timestamps; the filter counts the whole frame."""


def main() -> None:
    """Measure at every rate, print the table; exit 1 if a row exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", default="400,200,100")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(measure(arguments.rank)))
        return
    rates = [None, *map(int, arguments.mbit.split(","))]
    seconds: dict[int | None, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(arguments.repeats):
        for mbit in rates:
            for stage, steps in run_ranks(mbit).items():
                seconds[mbit][stage] += steps
    sys.exit(print_table(seconds) > LIMIT)


def print_table(seconds: dict[int | None, dict[int, list[float]]]) -> float:
    """Print the table and return the largest error. None is the rate without a limit."""
    worst = 0.0
    print("| link, Mbit/s | ZeRO stage | computation, s | predicted, s | measured, s | ratio |")
    print("|--:|--:|--:|--:|--:|--:|")
    unlimited = seconds.pop(None)
    for mbit, stages in seconds.items():
        for stage, steps in stages.items():
            compute = statistics.median(unlimited[stage])
            predicted = compute + communication_seconds(stage, mbit=mbit)
            measured = statistics.median(steps)
            worst = max(worst, abs(predicted / measured - 1))
            print(
                f"| {mbit:,} | {stage} | {compute:.2f} | {predicted:.2f} | {measured:.2f} "
                f"| {predicted / measured:.3f} |"
            )
    print(f"\nlargest error {worst:.1%}, limit {LIMIT:.0%}")
    return worst


def config_of(stage: int) -> RunConfig:
    """4 million parameters, two micro-batches per rank."""
    return RunConfig.model_validate(
        {
            "directory": "run",
            "data": {"path": "data", "num_lanes": 2 * MICRO_BATCHES, "tgt_len": 8},
            "model": {
                "vocab_size": 2000, "n_layer": 4, "d_model": 256, "n_head": 4, "d_head": 64,
                "d_inner": 1024, "mem_len": 8,
            },
            "training": {"num_steps": 10, "micro_batch_lanes": 1, "rank_timeout_seconds": 300.0},
            "deepspeed": {
                "zero_stage": stage,
                "extra": {"zero_optimization": {"reduce_bucket_size": 10_000_000}},
            },
        }
    )  # fmt: skip


def communication_seconds(stage: int, *, mbit: int) -> float:
    """Predicted for one step of two ranks."""
    config = config_of(stage)
    gbit = mbit / 1000 * PAYLOAD_SHARE
    links = Links(gpus_per_node=1, node_gbit=gbit, latency_seconds=LATENCY_SECONDS)
    collectives = collectives_of_step(
        dry_run(config, micro_batch_rows=1, device="cpu"),
        ZeroSettings.of(config.deepspeed, num_ranks=2, on_gpu=False),
        num_micro_batches=MICRO_BATCHES,
    )
    return sum(as_gloo_runs_it(each).seconds(2, links) for each in collectives)


def as_gloo_runs_it(collective: Collective) -> Collective:
    """torch's gloo backend all-reduces a copy for a reduce-scatter; the model is for NCCL.

    Source: `ProcessGroupGloo::reduce_scatter_tensor_coalesced`.
    """
    is_scattered = collective.kind == "reduce_scatter"
    return replace(collective, kind="all_reduce") if is_scattered else collective


def measure(rank: int) -> dict[int, list[float]]:
    """Seconds of the steps of each stage on this rank."""
    world = World(rank, 2)
    world.join(timeout_seconds=60)
    seconds = {
        stage: measure_steps(config_of(stage), world, count_bytes=False).step_seconds
        for stage in STAGES
    }
    world.leave()
    return seconds


def run_ranks(mbit: int | None) -> dict[int, list[float]]:
    """`measure` on both hosts; the result of rank 0."""
    with two_hosts() as hosts:
        if mbit is not None:
            for host in hosts:
                host.limit_rate(bits_per_second=mbit * 10**6)
        ranks = [start_rank(rank, hosts) for rank in range(2)]
        outputs = [process.communicate() for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit("\n".join(errors for _, errors in outputs))
    result = json.loads(outputs[0][0].splitlines()[-1])
    return {int(stage): steps for stage, steps in result.items()}


def start_rank(rank: int, hosts: Sequence[Host]) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": hosts[rank].interface,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.shaped_link", "--rank", str(rank)]
    return subprocess.Popen(
        [*hosts[rank].prefix, *command],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


if __name__ == "__main__":
    main()
