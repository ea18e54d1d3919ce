"""The page of `txl report` in headless Chromium: no error, all charts, no scrolling sideways."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_directories import write_results, write_run
from txl_dist.analysis.run_report import read_run, run_page

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
