"""`txl report`: the page shows what the run directory says, and runs nothing that it contains."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.run_directories import write_results, write_run
from txl_dist.analysis import run_report
from txl_dist.analysis.plots import draw_lines, new_figure
from txl_dist.analysis.run_report import charts_of_runs, read_run, run_page, thin_out
from txl_dist.cli.app import app
from txl_dist.errors import ConfigError
from txl_dist.events import WallTime, goodput_of

CURVES = [
    "Training loss in nats per token",
    "Loss of split valid in nats per token",
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


without_charts = pytest.mark.usefixtures("_without_charts")


def page_of(*runs: Path) -> str:
    return run_page([read_run(run) for run in runs])


@without_charts
def test_the_page_has_the_numbers_of_the_run(run: Path) -> None:
    page = page_of(run)
    # Without it a phone shows the page of a wide screen, in tiny text.
    assert 'name="viewport" content="width=device-width' in page
    for text in (
        "my run", "4.4400 at step 6", "105", "4.3000", "7 of 7", "finished at step 7",
        "12,345", "a: a CPU, 2 cores", "mem_len: 8", "missing/data",
        "resuming at step 3 from x", "step 5 has diverged: the loss is nan",
    ):  # fmt: skip
        assert text in page, text


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
    goodput = goodput_of(WallTime.of(read_run(run).events).seconds)
    assert f"<td>steps: the goodput</td><td>{goodput:.1%}</td>" in page
    assert "50.0%" not in page
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == CURVES
    _, first = next(charts_of_runs([read_run(run)]))
    assert first.decode() == charts[0], "the same bytes"


def test_losses_that_are_not_finite_leave_an_empty_chart(run: Path) -> None:
    svg = dict(charts_of_runs([read_run(run)]))["Gradient norm before clipping"]
    labels = re.findall(r"<!-- (.*?) -->", svg.decode())
    assert "1" in labels
    assert not any("10^" in label for label in labels), "numbers as people write them"
    lines = [{"step": step, "loss": "nan", "gradient_norm": "inf"} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [title for title, _ in charts_of_runs([read_run(run)])] == [CURVES[0], CURVES[3]]


def texts_of_charts(*runs: Path) -> list[str]:
    return [
        " ".join(re.findall(r"<!-- (.*?) -->", svg.decode()))
        for _, svg in charts_of_runs([read_run(run) for run in runs])
    ]


def test_one_run_is_drawn_by_step_with_its_events_and_several_by_tokens(
    run: Path, tmp_path: Path
) -> None:
    for text in texts_of_charts(run):
        assert all(part in text for part in ("step", "restart (1)", "diverged step (1)")), text
    for text in texts_of_charts(run, write_run(tmp_path / "other")):
        assert "tokens" in text
        assert "restart (" not in text
    for text in texts_of_charts(run, run):
        assert text.count(str(run)[-28:]) == 2, "also runs whose names end alike"
    (run / "events.jsonl").unlink()
    assert not any("restart (" in text or "diverged step" in text for text in texts_of_charts(run))


@without_charts
def test_a_run_in_progress_and_damaged_files_are_no_errors_and_named(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as journal:
        journal.write('{"step": 8, "loss": "nan", "x": [1]}\nnot json\n{"step": 9, "lo')
    (run / "events.jsonl").write_text('{"kind": "save"')
    (run / "config.yaml").unlink()
    (run / "evaluations").mkdir()
    (run / "evaluations" / "valid-0.json").write_text('{"checkpoint": "x"}')
    record = read_run(run)
    assert record.last_step == 8
    page = page_of(run)
    for text in ("events.jsonl has no events", "config.yaml cannot be read",
                 "valid-0.json is not a result of txl eval (split: Field required)"):  # fmt: skip
        assert text in page, text


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no step was trained yet"):
        read_run(tmp_path)


def test_long_series_are_drawn_as_means_that_keep_their_sum() -> None:
    series = [(step, float(step % 7)) for step in range(1000)]
    steps, values = thin_out(series, max_points=10)
    assert len(steps) == 10
    assert np.mean(values) == pytest.approx(np.mean([value for _, value in series]))
    short, _ = thin_out([(1, 2.0), (2, float("nan")), (3, 1.0)])
    assert short.tolist() == [1, 3]
    axes = new_figure((1, 1)).subplots()
    draw_lines(axes, [("one point is seen", [1], [2.0])])
    assert axes.get_lines()[0].get_marker() == "."


def test_the_scores_of_every_split_are_shown_apart_and_named(run: Path, tmp_path: Path) -> None:
    """`evaluation.split` may change at a resume, and differ between runs."""
    other = write_run(tmp_path / "other")
    with (other / "metrics.jsonl").open("a") as journal:
        journal.write('{"step": 7, "tokens": 105, "<i>/loss": 9.5}\n')
    page = page_of(run, other)
    charts = re.findall(r"<figcaption>(Loss of .*?)</figcaption>", page)
    assert charts == [f"Loss of split {name} in nats per token" for name in ("valid", "&lt;i&gt;")]
    for name, cells in (
        ("valid", "<td>4.4400 at step 6</td><td>4.4400 at step 6</td>"),
        ("&lt;i&gt;", "<td>-</td><td>9.5000 at step 7</td>"),
    ):
        assert f"<td>best loss of split {name}</td>{cells}" in page


@without_charts
def test_several_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "deeper" / "my run", mem_len=0)
    write_results(run)
    page = page_of(run, other)
    assert "2 runs compared" in page
    assert f"<th>{other}</th>" in page
    cells = re.findall(r"<td>model.mem_len</td><td[^>]*>(\d+)</td><td[^>]*>(\d+)", page)
    assert cells == [("8", "0")]
    assert "<td>training.num_steps" not in page, "equal settings are not listed"
    for text in (">2.6000<", "<th>bits per byte</th>"):
        assert page.count(text) == 1, text
    assert page_of(run, run).count(">2.6000<") == 1, "an evaluation is shown once"
    assert page.count("the protocol line") == 3


@without_charts
def test_the_command_writes_the_page_into_the_run(run: Path) -> None:
    path = run / "report.html"
    assert f"wrote {path}" in CliRunner().invoke(app, ["report", str(run)]).stdout
    assert path.read_text().startswith("<!doctype html>")
    path = run.parent / "comparison.html"
    assert f"wrote {path}" in CliRunner().invoke(app, ["report", str(run), str(run)]).stdout
    assert path.is_file()


# --- in headless Chromium -------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PROBE = """<script>
console.error("probe");
window.onload = () => {
  const root = document.documentElement;
  const images = [...document.images];
  parent.postMessage(JSON.stringify({
    window: window.innerWidth, page: root.scrollWidth,
    drawn: images.filter(i => i.complete && i.naturalWidth > 0).length,
    scales: images.map(i => i.clientWidth / i.naturalWidth),
  }), "*");
};
</script>"""
"""Reports what the browser sees; one error shows that errors would be seen."""
FRAME = """<!doctype html><script>onmessage = event => document.title = event.data</script>
<iframe src="{page}" style="width: {width}px; height: 900px; border: 0"></iframe>"""
"""The window of a headless browser has at least 500 pixels, a frame has any width."""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)} (apt-get install chromium)")
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of one run and a comparison, with long names and results."""
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder / name / ("a_long_name_" * 6)) for name in ("a", "b")]
    write_results(runs[0])
    records = [read_run(run) for run in runs]
    paths = {}
    for name, shown in (("one", records[:1]), ("two", records)):
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(run_page(shown) + PROBE)
    return paths


def seen(browser: str, page: Path, width: int) -> dict[str, Any]:
    """What PROBE reports; `errors` are the messages of the console."""
    frame = page.with_name(f"{page.stem}-{width}.html")
    frame.write_text(FRAME.format(page=page.name, width=width))
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'browser'}", "--enable-logging=stderr",
        "--window-size=1400,1000", "--virtual-time-budget=2000", "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(\{.*?\})</title>", ended.stdout)
    assert title is not None, ended.stderr[-2000:]
    errors = re.findall(r"CONSOLE[^\]]*\] \"?(.*?)\"?, source", ended.stderr)
    return {**json.loads(title[1]), "errors": errors}


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["one", "two"])
def test_the_page_fits_the_window_and_has_all_charts(
    browser: str, pages: dict[str, Path], width: int, name: str
) -> None:
    page = seen(browser, pages[name], width)
    assert page["errors"] == ["probe"]
    assert page["window"] == width
    assert page["page"] <= width, "the page scrolls sideways"
    assert page["drawn"] == 4 == pages[name].read_text().count("<img ")
    # Their text has 8 to 9 points at scale 1, which is 10.7 to 12 pixels.
    assert min(page["scales"]) >= 0.85
