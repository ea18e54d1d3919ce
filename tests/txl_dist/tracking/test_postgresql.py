"""Tracking on MLflow with a real PostgreSQL, which crashes while two ranks train."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.support.commands import num_lines, start_txl, wait_until
from tests.support.tracking_servers import PostgresServer, mlflow_server, postgres_server
from tests.support.training_runs import NO_EVALUATION, TINY, metrics
from tests.txl_dist.tracking.conftest import run_id_of
from txl_dist.tracking.tracker import TrackingState, points_of

LINES_MEANWHILE = 40
"""Lines of metrics that must be written during the outage: training does not wait."""


@pytest.mark.cluster
def test_a_database_that_is_restarted_in_the_middle_gets_every_point_once(
    dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    journal, log = run / "metrics.jsonl", run / "logs" / "rank-0.log"
    with postgres_server() as database, mlflow_server(database.uri, tmp_path) as uri:
        training = start_txl(
            *("train", TINY, "--on", "processes", "--ranks", 2, NO_EVALUATION),
            *(f"data.path={dataset}", f"directory={run}", "training.num_steps=1000000"),
            f"tracking={{enabled: true, uri: '{uri}'}}",
        )
        try:
            wait_until(lambda: num_recorded_steps(database) > 10, poll_seconds=0.5)
            database.stop(signal.SIGQUIT)  # a crash: clients learn of it by a closed connection
            wait_until(lambda: "cannot be reached" in log.read_text())
            lines = num_lines(journal) + LINES_MEANWHILE
            wait_until(lambda: num_lines(journal) >= lines)
            assert training.poll() is None
            database.start()
            lines = num_lines(journal)
            wait_until(lambda: num_recorded_steps(database) > lines, poll_seconds=0.5)
            training.send_signal(signal.SIGTERM)
            output, _ = training.communicate(timeout=120)
        finally:
            training.kill()
        assert training.returncode == 75, output
        run_id = run_id_of(run)
        wait_until(lambda: is_delivered(run), timeout_seconds=60)
        rows = database.query("SELECT key, step, timestamp, run_uuid FROM metrics")
    written = [(p.metric, p.step, p.milliseconds) for line in metrics(run) for p in points_of(line)]
    assert Counter(rows) == Counter((*point, run_id) for point in written)


def is_delivered(run: Path) -> bool:
    state = TrackingState.load(run / "tracking.json")
    return state is not None and state.delivered


def num_recorded_steps(database: PostgresServer) -> int:
    ((number,),) = database.query("SELECT count(*) FROM metrics WHERE key = 'loss'")
    return int(number)
