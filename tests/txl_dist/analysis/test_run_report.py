"""`txl report`: the page shows what the run directory says, and runs nothing that it contains."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from txl_dist.analysis.plots import draw_charts, thin_out
from txl_dist.analysis.run_report import MAX_EVENTS, read_run, run_page
from txl_dist.cli.app import app
from txl_dist.errors import CheckpointError
from txl_dist.training.goodput import GoodputFile

NUM_STEPS = 7


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "my run"
    (path / "logs").mkdir(parents=True)
    lines = []
    for step in range(1, NUM_STEPS + 1):
        values = {"loss": 5.0 - step / 10, "lr": 1e-3, "gradient_norm": 1.0, "goodput": 0.5}
        lines.append({"step": step, "tokens": 15 * step, "time": 1e9 + step, **values})
        if step in (3, 6):
            lines.append({**lines[-1], "valid/loss": 4.5 - step / 100, "valid/perplexity": 80.0})
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    seconds = {"steps": 6.0, "start-up": 3.0, "evaluation": 1.0}  # ended after the last step line
    goodput = GoodputFile(
        updated=1e9, step=NUM_STEPS, restarts=0, lost_steps=0, is_complete=True,
        seconds=seconds, productive={},
    )  # fmt: skip
    (path / "goodput.json").write_text(goodput.model_dump_json())
    (path / "config.yaml").write_text("directory: runs/<b>bold</b>\n")
    (path / "logs" / "rank-0.log").write_text(
        "12:00:00 step 1 | loss 4.9\n12:00:01 resuming </pre><script>alert(1)</script>\n"
    )
    return path


def test_the_page_has_the_numbers_of_the_run(run: Path) -> None:
    page = run_page(read_run(run))
    for text in ("my run", "best valid/loss", "4.4400 at step 6", "60.0%", "105", "4.3000"):
        assert text in page, text
    assert "resuming" in page
    assert "step 1 | loss" not in page, "step lines are no events"
    assert page == run_page(read_run(run)), "the same bytes"


def test_goodput_is_one_number_from_one_place(run: Path) -> None:
    """In the summary and in the chart of the wall time; the last step line has an older one."""
    page = run_page(read_run(run))
    charts = [base64.b64decode(data).decode() for data in re.findall(r"base64,([^\"]*)", page)]
    texts = [page, *charts]
    assert sum("60.0%" in text for text in texts) == 2
    assert not any("50.0%" in text for text in texts)


def test_text_of_the_run_is_escaped_and_nothing_is_loaded_from_elsewhere(run: Path) -> None:
    page = run_page(read_run(run))
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page
    assert set(re.findall(r'(?:src|href)="([^:]*):', page)) == {"data"}


def test_a_run_in_progress_and_damaged_files_are_no_errors(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as journal:
        journal.write('{"step": 8, "loss": "NaN", "x": [1]}\nnot json\n{"step": 9, "lo')
    (run / "goodput.json").write_text("{")
    (run / "config.yaml").unlink()
    record = read_run(run)
    assert record.last["step"] == 8
    assert "config.yaml cannot be read" in run_page(record)


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a run directory"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="no complete line"):
        read_run(tmp_path)


def test_of_many_events_the_newest_are_shown(run: Path) -> None:
    (run / "logs" / "rank-0.log").write_text("".join(f"event {n}\n" for n in range(MAX_EVENTS + 5)))
    record = read_run(run)
    assert (record.events[0], record.num_omitted_events) == ("event 5", 5)
    assert "5 older lines" in run_page(record)


def test_long_series_are_drawn_as_means_that_keep_their_sum() -> None:
    series = [(step, float(step % 7)) for step in range(1000)]
    steps, values = thin_out(series, max_points=10)
    assert len(steps) == 10
    assert np.mean(values) == pytest.approx(np.mean([value for _, value in series]))
    short, _ = thin_out([(1, 2.0), (2, float("nan")), (3, 1.0)])
    assert short.tolist() == [1, 3]


def test_only_what_the_run_has_is_drawn(run: Path) -> None:
    titles = [title for title, _ in draw_charts(read_run(run))]
    always = ["Loss in nats per token", "Learning rate", "Gradient norm before clipping"]
    assert titles == [*always, "Wall time by cause"]


def test_the_command_writes_the_page_into_the_run(run: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run), "--json"])
    path = run / "report.html"
    assert json.loads(result.stdout) == {"run": str(run), "report": str(path), "step": NUM_STEPS}
    assert path.read_text().startswith("<!doctype html>")
