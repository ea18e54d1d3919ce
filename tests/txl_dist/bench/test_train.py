"""`txl bench train`: how its figures follow from the speeds of runs. Limits are not checked."""

import socket
from pathlib import Path

import pytest

from txl_dist.bench.train import Speed, bench_config, figures_of, silent_server
from txl_dist.config.config_file import load_run_config
from txl_dist.config.training_config import TrackingConfig

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def test_figures_are_medians_of_the_ratios_of_neighbouring_runs() -> None:
    speeds = {
        "one": [Speed(100.0, 0.001), Speed(200.0, 0.002), Speed(50.0, 0.009)],
        "hanging": [Speed(80.0, 0.5), Speed(160.0, 0.5), Speed(50.0, 0.5)],
        "two": [Speed(190.0, 0.5), Speed(300.0, 0.5), Speed(100.0, 0.5)],
    }
    rates = [(90.0, 90.0), (170.0, 190.0), (50.0, 50.0)]
    pairs = [(Speed(first, 0.5), Speed(second, 0.5)) for first, second in rates]
    wait, tracking, scaling = figures_of(speeds, pairs)
    assert wait.value == pytest.approx(0.2)
    assert tracking.value == pytest.approx(25.0)
    assert scaling.value == pytest.approx(0.95)
    assert [figure.holds for figure in (wait, tracking, scaling)] == [True, False, True]
    assert "0 to 25 in 3 rounds" in tracking.note
    assert "do not communicate: 0.90" in scaling.note


def test_the_model_and_the_lanes_of_two_ranks_are_those_of_the_quickstart() -> None:
    quickstart = load_run_config(QUICKSTART, [])
    tracking = TrackingConfig(enabled=False)
    config = bench_config(Path("data"), Path("run"), num_ranks=2, num_steps=20, tracking=tracking)
    assert config.model == quickstart.model
    assert config.data.num_lanes == quickstart.data.num_lanes
    assert config.data.tgt_len == quickstart.data.tgt_len


def test_the_silent_server_accepts_and_does_not_answer() -> None:
    with silent_server() as uri:
        host, port = uri.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=0.1) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with pytest.raises(TimeoutError):
                client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
