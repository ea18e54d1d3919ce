"""The interface of trackers, for one of another package, and the files about a tracked run."""

import json
import os
from pathlib import Path

import pytest

from tests.txl_dist.tracking.conftest import tracking_config, write_steps
from txl_dist.tracking.process import TrackingProcess
from txl_dist.tracking.tracker import TrackingRequest, TrackingState

TRACKER = """
import json

class LinesTracker:
    def __init__(self, uri, run_dir):
        self.path = uri.removeprefix("lines://")

    def write(self, *words):
        with open(self.path, "a") as file:
            print(json.dumps(words), file=file)

    def start(self, run):
        self.write("start", run.experiment, run.params["training.num_steps"])
        return run.key

    def recorded(self, run_id, metric):
        with open(self.path) as file:
            points = [line[1:] for line in map(json.loads, file) if line[0] == "point"]
        return {(step, ms) for name, step, ms in points if name == metric}

    def log(self, run_id, points):
        for point in points:
            self.write("point", point.metric, point.step, point.milliseconds)

    def end(self, run_id, status):
        self.write("end", status)
"""


def test_a_tracker_of_another_package_gets_every_point_once_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, run, written = tmp_path / "site", tmp_path / "run", tmp_path / "written"
    (site / "lines_tracker-1.dist-info").mkdir(parents=True)
    (site / "lines_tracker.py").write_text(TRACKER)
    (site / "lines_tracker-1.dist-info" / "entry_points.txt").write_text(
        "[txl.trackers]\nlines = lines_tracker:LinesTracker\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run.mkdir()
    for status, steps in (("preempted", range(1, 4)), ("finished", range(4, 6))):
        write_steps(run, steps)
        tracker = TrackingProcess(run, tracking_config(run, f"lines://{written}"))
        tracker.close(status, timeout_seconds=120)
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert lines[0] == ["start", "tests", "10"]
    assert [line[2] for line in lines if line[:2] == ["point", "loss"]] == [1, 2, 3, 4, 5]
    assert [line[1] for line in lines if line[0] == "end"] == ["preempted", "finished"]


@pytest.mark.parametrize("content", ["", "{", "null", "[1]", "{}", "[" * 10**5])
def test_a_damaged_file_is_read_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tracking.json"
    path.write_text(content)
    assert TrackingState.load(path) is None


def test_a_request_of_an_earlier_version_is_read_without_its_unknown_fields(tmp_path: Path) -> None:
    path = tmp_path / "tracking-request.json"
    request = TrackingRequest(server=None, experiment="tests", params={"a": "1"})
    path.write_text(json.dumps({**json.loads(request.model_dump_json()), "new_run_key": "0123"}))
    assert TrackingRequest.load(path) == request
