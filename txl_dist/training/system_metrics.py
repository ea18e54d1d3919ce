"""SystemMetrics: use of processors, memory, disks, network and GPUs by all hosts of a run.

Names and units are those of MLflow, whose page has a tab for them: `system/NAME` for one host and
`system/HOST/NAME` for several. MLflow's own monitor is a thread per process that sends to the
server; here the values join a step line, so they reach the journal and are sent by its sender.

The ranks measure after the same step, about every 10 seconds at first and every 5 minutes in a long
run, and rank 0 collects the values in one collective. Processor use is the mean since the
measurement before. Each rank reports its own GPU: `gpu_0` is that of the first rank on a host.
Utilisation and power of GPUs need the package nvidia-ml-py.
"""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import torch

from txl_dist.runtime.world import World
from txl_dist.training.observer import Observer, Values
from txl_dist.training.state import TrainState

if TYPE_CHECKING:
    from txl_dist.training.step import StepResult

MIN_SECONDS, MAX_SECONDS = 10.0, 300.0
"""Between two measurements. Weeks at 10 s would be most of a run's points."""
SHARE = 0.01
"""Between them, the time between two measurements is this share of the time of the process."""

Sample = tuple[str, Values, Values]
"""Host, its values, and those of the GPU of one rank."""


class SystemMetrics(Observer):
    """Measures on every rank, and adds the values to a line on rank 0."""

    def __init__(self, world: World) -> None:
        self._world, self._host = world, socket.gethostname()
        self._start = self._last = time.monotonic()
        self._received, self._sent = _network_megabytes()
        self._values: Values = {}
        psutil.cpu_percent()  # the next call measures the time since this one

    def flags(self) -> Mapping[str, bool]:
        now = time.monotonic()
        interval = min(MAX_SECONDS, max(MIN_SECONDS, SHARE * (now - self._start)))
        # By the clock of rank 0, so that one rank decides.
        return {"measure_system": self._world.is_rank_zero and now - self._last >= interval}

    def step(self, state: TrainState, result: "StepResult") -> None:
        if "measure_system" in result.raised:
            self._last = time.monotonic()
            sample = self._host, self._measure(), gpu_values(self._world.device)
            self._values = system_values(self._world.all_gather(sample))

    def line(self, state: TrainState, values: Values) -> None:
        values |= self._values
        self._values = {}

    def _measure(self) -> Values:
        memory, values = psutil.virtual_memory(), dict[str, float]()
        with suppress(OSError):
            disk = psutil.disk_usage(os.sep)
            values = {
                "disk_usage_percentage": disk.percent,
                "disk_usage_megabytes": disk.used / 1e6,
                "disk_available_megabytes": disk.free / 1e6,
            }
        received, sent = _network_megabytes()
        return {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.used / memory.total * 100,
            **values,
            "network_receive_megabytes": received - self._received,
            "network_transmit_megabytes": sent - self._sent,
        }


def _network_megabytes() -> tuple[float, float]:
    """Received and sent since the start of the machine; 0 where it is not known."""
    with suppress(OSError):  # a container may hide /proc/net
        if counters := psutil.net_io_counters():
            return counters.bytes_recv / 1e6, counters.bytes_sent / 1e6
    return 0.0, 0.0


def gpu_values(device: torch.device) -> Values:
    """Use of one GPU, by MLflow's names without `gpu_N_`; empty for a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    values: Values = {
        "memory_usage_percentage": (total - free) / total * 100,
        "memory_usage_megabytes": (total - free) / 1e6,
    }
    # Without nvidia-ml-py, or a GPU that does not tell: the driver has errors of its own.
    with suppress(Exception):
        values["utilization_percentage"] = torch.cuda.utilization(device)
        values["power_usage_watts"] = torch.cuda.power_draw(device) / 1e3
    return values


def system_values(samples: list[Sample]) -> Values:
    """The values of all ranks by their names in a line. The first rank of a host measures it."""
    hosts = list(dict.fromkeys(host for host, _, _ in samples))
    values: Values = {}
    for host in hosts:
        ranks = [(of_host, of_gpu) for name, of_host, of_gpu in samples if name == host]
        prefix = f"system/{host}/" if len(hosts) > 1 else "system/"
        values |= {f"{prefix}{name}": value for name, value in ranks[0][0].items()}
        for number, (_, of_gpu) in enumerate(ranks):
            values |= {f"{prefix}gpu_{number}_{name}": value for name, value in of_gpu.items()}
    return {name: round(value, 1) for name, value in values.items()}
