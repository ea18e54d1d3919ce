"""`txl report`: the page shows what the run directory says, and runs nothing that it contains."""

import base64
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.commands import run_txl
from tests.support.run_directories import (
    NUM_STEPS,
    evaluation,
    event,
    write_events,
    write_results,
    write_run,
)
from txl_dist.analysis import run_report
from txl_dist.analysis.page import html_page
from txl_dist.analysis.run_charts import charts_of_runs, memory_chart, thin_out
from txl_dist.analysis.run_record import read_run
from txl_dist.analysis.run_report import MAX_EVENTS, run_page
from txl_dist.cli import runs
from txl_dist.cli.app import app
from txl_dist.errors import ConfigError, TxlError
from txl_dist.tracking.tracker import STATE, TrackedRun, TrackingState, open_tracker

CURVES = [
    "Training loss in nats per token",
    "Validation loss in nats per token",
    "Learning rate",
    "Gradient norm before clipping",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "my run")


@pytest.fixture
def _without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time of a page."""
    monkeypatch.setattr(run_report, "charts_of_runs", lambda runs: ())
    monkeypatch.setattr(run_report, "memory_chart", lambda results: ())


without_charts = pytest.mark.usefixtures("_without_charts")


def page_of(*runs: Path) -> str:
    return run_page([read_run(run) for run in runs])


@without_charts
def test_the_page_has_the_numbers_of_the_run(run: Path) -> None:
    page = page_of(run)
    for text in (
        "my run", "4.4400 at step 6", "105", "4.3000", "7 of 7", "finished at step 7",
        "12,345", "a: a CPU, 2 cores", "recurrent, mem_len 8", "missing/data",
        "resuming at step 3 from x", "step 5 has diverged: the loss is nan",
    ):  # fmt: skip
        assert text in page, text


@without_charts
def test_axes_and_headings_have_numbers_and_words_as_people_write_them(run: Path) -> None:
    line = {"step": 7, "tokens": 105, "time": 1e9 + 9, "valid/loss": 4.4, "valid/tokens_scored": 80}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    charts = charts_of_runs([read_run(run)])
    svg = next(chart.svg for chart in charts if chart.title == "Gradient norm before clipping")
    labels = re.findall(r"<!-- (.*?) -->", svg.decode())
    assert "1" in labels
    assert not any("10^" in label for label in labels), labels
    assert ">tokens scored</th>" in page_of(run)


def test_text_of_the_run_is_escaped_and_nothing_is_loaded_from_elsewhere(run: Path) -> None:
    page = page_of(run)
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page
    assert set(re.findall(r'(?:src|href)="([^:]*):', page)) == {"data"}
    charts = [base64.b64decode(data).decode() for data in re.findall(r"base64,([^\"]*)", page)]
    assert len(charts) == len(CURVES)
    assert not any("<script" in chart or 'href="http' in chart for chart in charts)
    # Goodput is one number from one place; the last step line has an older one.
    goodput = f"{read_run(run).wall_time.goodput:.1%}"
    assert page.count(goodput) == 2, "in the facts, and in the table of causes"
    assert "50.0%" not in page
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == CURVES
    first = next(iter(charts_of_runs([read_run(run)])))
    assert first.svg.decode() == charts[0], "the same bytes"


def test_several_runs_are_also_compared_by_tokens(run: Path, tmp_path: Path) -> None:
    records = [read_run(run), read_run(write_run(tmp_path / "other"))]
    charts = [chart.title for chart in itertools.islice(charts_of_runs(records), 2)]
    assert charts == [CURVES[0], "Training loss by tokens"]


def test_losses_that_are_not_finite_leave_an_empty_chart(run: Path) -> None:
    lines = [{"step": step, "loss": "nan", "gradient_norm": "inf"} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    titles = [chart.title for chart in charts_of_runs([read_run(run)])]
    assert titles == [CURVES[0], CURVES[3]]


def test_restarts_and_divergences_are_marked_on_the_losses(run: Path) -> None:
    def marks() -> list[str]:
        texts = []
        for chart in itertools.islice(charts_of_runs([read_run(run)]), 2):
            assert chart.title in CURVES[:2]
            texts.append(" ".join(re.findall(r"<!-- (.*?) -->", chart.svg.decode())))
        return texts

    assert all("restart (1)" in text and "diverged step (1)" in text for text in marks())
    (run / "events.jsonl").unlink()
    assert not any("restart (" in text or "diverged step" in text for text in marks())


@without_charts
def test_a_run_in_progress_and_damaged_files_are_no_errors_and_named(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as journal:
        journal.write('{"step": 8, "loss": "NaN", "x": [1]}\nnot json\n{"step": 9, "lo')
    (run / "events.jsonl").write_text('{"kind": "save"')
    (run / "config.yaml").unlink()
    (run / "evaluations").mkdir()
    (run / "evaluations" / "valid-0.json").write_text('{"checkpoint": "x"}')
    record = read_run(run)
    assert record.last["step"] == 8
    page = page_of(run)
    for text in ("events.jsonl has no events", "config.yaml cannot be read",
                 "valid-0.json is not shown: split: Field required"):  # fmt: skip
        assert text in page, text


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no complete line"):
        read_run(tmp_path)


@without_charts
def test_of_many_events_the_newest_are_shown(run: Path) -> None:
    (run / "events.jsonl").unlink()
    write_events(run, *(event("score", f"of step {n}") for n in range(MAX_EVENTS + 5)))
    page = page_of(run)
    assert "of step 4\n" not in page
    assert "of step 5\n" in page
    assert "5 older events" in page


def test_long_series_are_drawn_as_means_that_keep_their_sum() -> None:
    series = [(step, float(step % 7)) for step in range(1000)]
    steps, values = thin_out(series, max_points=10)
    assert len(steps) == 10
    assert np.mean(values) == pytest.approx(np.mean([value for _, value in series]))
    short, _ = thin_out([(1, 2.0), (2, float("nan")), (3, 1.0)])
    assert short.tolist() == [1, 3]


def test_scores_of_several_lengths_of_the_memory_are_a_table_and_a_chart(run: Path) -> None:
    write_results(run)
    page = page_of(run)
    assert "Loss by length of the memory" in page
    for text in (">2.6000<", "the protocol line", '<th class="number">bits per byte</th>'):
        assert text in page, text


def test_an_evaluation_is_shown_once_and_with_its_details(run: Path) -> None:
    (run / "evaluations").mkdir()
    for name, details in (("test-0", False), ("test-1", True)):
        result = evaluation("my run", 8, 2.5, details=details)
        (run / "evaluations" / f"{name}.json").write_text(json.dumps(result))
    (shown,) = read_run(run).results
    assert shown.details is not None
    assert list(memory_chart([shown])) == []


@without_charts
def test_several_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "deeper" / "my run", mem_len=0)
    write_results(run)
    records = [read_run(run), read_run(other)]
    page = run_page(records)
    assert "2 runs compared" in page
    assert "<th>deeper/my run</th>" in page, "names that differ"
    cells = re.findall(r"<td>model.mem_len</td><td[^>]*>(\d+)</td><td[^>]*>(\d+)", page)
    assert cells == [("8", "0")]
    assert "<td>training.num_steps" not in page, "equal settings are not listed"
    assert page.count(">2.6000<") == 1, "a result is shown once"


@without_charts
def test_the_command_writes_the_page_into_the_run(run: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run), "--json"])
    path = run / "report.html"
    content = json.loads(result.stdout)
    assert (content["report"], content["step"]) == (str(path), NUM_STEPS)
    assert path.read_text().startswith("<!doctype html>")
    result = CliRunner().invoke(app, ["report", str(run), str(run), "--json"])
    path = run.parent / "comparison.html"
    assert json.loads(result.stdout)["report"] == str(path)
    assert path.is_file()


@without_charts
def test_a_page_of_a_run_without_tracking_is_not_recorded(run: Path) -> None:
    code, message = run_txl("report", run, "--to-mlflow")
    assert code == 2
    assert "has no run in MLflow" in message


def test_a_server_that_does_not_answer_does_not_hold_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = TrackingState(key="k", server=None, experiment="tests", run_id="r")
    (tmp_path / STATE).parent.mkdir(parents=True, exist_ok=True)
    state.save(tmp_path / STATE)
    monkeypatch.setattr(runs, "MLFLOW_SECONDS", 0.05)
    with pytest.raises(TxlError, match=r"no response within 0\.05 s"):
        runs._keep_in_mlflow(tmp_path, tmp_path / "report.html")


@pytest.mark.slow
@without_charts
def test_the_page_is_kept_with_the_run_in_mlflow(run: Path) -> None:
    tracker = open_tracker(None, run)
    run_id = tracker.start(TrackedRun(key="k", name="run", experiment="tests"))
    TrackingState(key="k", server=None, experiment="tests", run_id=run_id).save(run / STATE)
    code, output = run_txl("report", run, "--to-mlflow")
    assert code == 0, output
    (kept,) = (run.parent / "mlartifacts").rglob("report.html")
    assert kept.parent.parent.name == run_id
    assert kept.read_bytes() == (run / "report.html").read_bytes()


def test_a_viewport_is_set() -> None:
    """Without it a phone shows the page of a wide screen, in tiny text."""
    assert 'name="viewport" content="width=device-width' in html_page("t", [])
