"""How well `collective_times.py` predicts a step over a slow link: two ranks, two hosts.

    sudo python benchmarks/estimate_links.py [--mbit 400,100]

The hosts are network namespaces that a virtual cable connects, with the rate of each end limited
(`tc tbf`). The compute time of a step is taken from a run without a limit; the communication is
predicted from the sizes of parameters and the rate. On CPUs nothing overlaps, so they add up.
Fails if a prediction is off by more than 20 %.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

LIMIT = 0.20
STAGES = (0, 1, 2, 3)
NUM_STEPS = 4
ADDRESSES = ("10.77.41.1", "10.77.41.2")
BURST = "256kb"
"""tbf passes this much without delay; several packets of 64 KiB."""


def main() -> None:
    """Measure at every rate, print the table; exit 1 if a row exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", default="400,100")
    parser.add_argument("--rank", type=int, help="Internal: be one of the two ranks.")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(measure(arguments.rank)))
        return
    with two_hosts() as interfaces:
        compute = run_ranks(interfaces)
        worst = 0.0
        print(f"{'link':>12} {'stage':>5} {'compute':>9} {'predicted':>9} {'measured':>9} ratio")
        for mbit in map(int, arguments.mbit.split(",")):
            for namespace, interface in interfaces:
                limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", "1s")
                tc("-n", namespace, "qdisc", "replace", "dev", interface, *limit)
            measured = run_ranks(interfaces)
            for stage in STAGES:
                predicted = compute[stage] + communication_seconds(stage, gbit=mbit / 1000)
                ratio = predicted / measured[stage]
                worst = max(worst, abs(ratio - 1))
                print(
                    f"{mbit:>7} Mbit {stage:>5} {compute[stage]:>7.2f} s {predicted:>7.2f} s "
                    f"{measured[stage]:>7.2f} s {ratio:.3f}"
                )
    print(f"largest error {worst:.1%}, limit {LIMIT:.0%}")
    sys.exit(worst > LIMIT)


def build(stage: int) -> Any:
    """The RunConfig of one stage: 4 million parameters, two micro-batches per rank."""
    from txl_dist.config.run_config import RunConfig

    return RunConfig.model_validate(
        {
            "directory": "run",
            "data": {"path": "data", "num_lanes": 4, "tgt_len": 8},
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


def communication_seconds(stage: int, *, gbit: float) -> float:
    """Predicted for one step."""
    from collective_times import Links, collectives_of_step

    from txl_dist.estimate.dry_run import dry_run
    from txl_dist.estimate.rank_bytes import ZeroSettings

    config = build(stage)
    links = Links(gpus_per_node=1, node_gbit=gbit, latency_seconds=1e-4)
    collectives = [
        as_gloo_runs_it(each)
        for each in collectives_of_step(
            dry_run(config, micro_batch_rows=1, device="cpu"),
            ZeroSettings.of(config.deepspeed, num_ranks=2, on_gpu=False),
            num_micro_batches=2,
        )
    ]
    return sum(each.seconds(2, links) for each in collectives)


def as_gloo_runs_it(collective: Any) -> Any:
    """torch's gloo backend all-reduces a copy for a reduce-scatter; the estimate is for NCCL.

    Source: `ProcessGroupGloo::reduce_scatter_tensor_coalesced`.
    """
    is_scattered = collective.kind == "reduce_scatter"
    return replace(collective, kind="all_reduce") if is_scattered else collective


def measure(rank: int) -> dict[int, float]:
    """Median seconds of a step by stage, without the first one."""
    from tests.support.measured_steps import measure_steps
    from txl_dist.runtime.world import World

    world = World(rank, len(ADDRESSES), 0)
    world.join(timeout_seconds=60)
    seconds = {}
    for stage in STAGES:
        steps = measure_steps(build(stage), world, num_steps=NUM_STEPS, count=False)
        seconds[stage] = statistics.median(steps.step_seconds[1:])
    return seconds


def run_ranks(interfaces: list[tuple[str, str]]) -> dict[int, float]:
    """`measure` on both hosts; the result of rank 0."""
    ranks = []
    for rank, (namespace, interface) in enumerate(interfaces):
        environment = {
            **os.environ,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29431",
            "GLOO_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", namespace, sys.executable, __file__, "--rank", str(rank)]
        ranks.append(
            subprocess.Popen(
                command,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    outputs = [process.communicate() for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit("\n".join(errors for _, errors in outputs))
    result = json.loads(outputs[0][0].splitlines()[-1])
    return {int(stage): seconds for stage, seconds in result.items()}


@contextmanager
def two_hosts() -> Iterator[list[tuple[str, str]]]:
    """(namespace, interface) of two connected hosts."""
    names = [(f"txl-{os.getpid()}-{end}", f"txe{os.getpid() % 10**6}{end}") for end in "ab"]
    (first, first_interface), (second, second_interface) = names
    try:
        for namespace, _ in names:
            ip("netns", "add", namespace)
        peer = ("type", "veth", "peer", "name", second_interface, "netns", second)
        ip("link", "add", first_interface, "netns", first, *peer)
        for (namespace, interface), address in zip(names, ADDRESSES, strict=True):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", namespace, "link", "set", interface, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield names
    finally:
        for namespace, _ in names:
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def tc(*words: str) -> None:
    subprocess.run(["tc", *words], check=True)


if __name__ == "__main__":
    main()
