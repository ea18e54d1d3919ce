"""Metrics of hosts: MLflow's names and units, every host once, at intervals, in a step line."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from txl_dist.runtime.world import World
from txl_dist.training import system_metrics
from txl_dist.training.system_metrics import MAX_SECONDS, SystemMetrics, gpu_values, system_values


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(system_metrics, "time", SimpleNamespace(monotonic=lambda: self.now))


def _step(observer: SystemMetrics) -> dict[str, float]:
    """A step and a line after it; returns the values that were added."""
    raised = {name for name, flag in observer.flags().items() if flag}
    state: Any = None
    result: Any = SimpleNamespace(raised=raised)
    observer.step(state, result)
    values: dict[str, float] = {}
    observer.line(state, values)
    return values


def test_names_and_units_are_those_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    observer = SystemMetrics(World(0, 1))
    clock.now = 11
    values = _step(observer)
    theirs: dict[str, float] = {}
    for monitor in (CPUMonitor(), DiskMonitor(), NetworkMonitor()):
        monitor.collect_metrics()
        theirs |= monitor.aggregate_metrics()
    assert values.keys() == {f"system/{name}" for name in theirs}
    for name in ("system_memory_usage_megabytes", "disk_available_megabytes"):
        assert values[f"system/{name}"] == pytest.approx(theirs[name], rel=0.5)
    assert 0 <= values["system/cpu_utilization_percentage"] <= 100


def test_a_host_that_hides_its_network_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> Any:
        raise FileNotFoundError("/proc/net/dev")

    clock = Clock(monkeypatch)
    monkeypatch.setattr(system_metrics.psutil, "net_io_counters", hidden)
    observer = SystemMetrics(World(0, 1))
    clock.now = 11
    values = _step(observer)
    assert values["system/network_receive_megabytes"] == 0
    assert values["system/system_memory_usage_megabytes"] > 0


def test_measurements_become_rare_in_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    observer, times = SystemMetrics(World(0, 1)), list[float]()
    for second in range(50_000):
        clock.now = second
        if observer.flags()["measure_system"] and _step(observer):
            times.append(second)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[:2] == [10, 20]
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_SECONDS
    assert len(times) < 600


def test_only_rank_0_decides_when_and_every_rank_takes_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    other, gathered = SystemMetrics(World(1, 2)), list[Any]()
    monkeypatch.setattr(World, "all_gather", lambda _, value: gathered.append(value) or gathered)
    clock.now = 1000
    assert not other.flags()["measure_system"]
    result: Any = SimpleNamespace(raised={"measure_system"})
    state: Any = None
    other.step(state, result)
    assert len(gathered) == 1


def test_each_host_is_measured_once_and_each_gpu_by_its_rank() -> None:
    samples = [
        ("a", {"cpu": 1.0}, {"memory": 10.0}),
        ("b", {"cpu": 2.0}, {"memory": 20.0}),
        ("a", {"cpu": 9.0}, {"memory": 11.0}),
    ]
    assert system_values(samples) == {
        **{"system/a/cpu": 1.0, "system/a/gpu_0_memory": 10.0, "system/a/gpu_1_memory": 11.0},
        **{"system/b/cpu": 2.0, "system/b/gpu_0_memory": 20.0},
    }
    assert system_values(samples[:1]) == {"system/cpu": 1.0, "system/gpu_0_memory": 10.0}


def test_a_gpu_without_nvml_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60_000_000, 80_000_000))
    monkeypatch.setattr(torch.cuda, "utilization", missing)
    memory = {"memory_usage_percentage": 25.0, "memory_usage_megabytes": 20.0}
    assert gpu_values(device) == memory
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 90)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 250_000)
    full = {**memory, "utilization_percentage": 90, "power_usage_watts": 250.0}
    assert gpu_values(device) == full


def test_names_of_gpus_are_those_of_mlflow() -> None:
    import mlflow.system_metrics.metrics.gpu_monitor as theirs

    text = Path(theirs.__file__).read_text()
    names = ("memory_usage_percentage", "memory_usage_megabytes", "utilization_percentage")
    for name in (*names, "power_usage_watts"):
        assert f'f"gpu_{{i}}_{name}"' in text
