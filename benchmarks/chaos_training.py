"""The training runs of chaos.py: their text and settings, the calls of `txl train`, the store."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from fault_traces import Reached, read_trace

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from txl_dist.runtime.fault_injection import TRACE_VARIABLE

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
MODULES = ("abc.py", "bisect.py", "colorsys.py", "copy.py", "heapq.py", "keyword.py", "this.py")
"""The text: modules of the standard library."""
SETTINGS = (
    "training.checkpoint_interval_steps=15",
    "evaluation.interval_steps=25",
    "evaluation.max_tokens=500",
    "model.dropout=0.1",
    "optimizer.schedule=constant",
    "tracking={enabled: true, experiment: chaos}",
)
NUM_RANKS = 2
LANES = (5, 6, 3)
"""Of the legs of a run, in turn."""
STEPS_PER_LEG = 130
"""Some legs end at the step of a checkpoint or of an evaluation, others do not."""
TIMEOUT_SECONDS = 600.0
"""Of every wait. Reaching it fails the benchmark."""
BUCKET = "chaos"


@contextmanager
def object_store() -> Iterator[None]:
    """An S3 on 127.0.0.1 that all calls of `txl train` find by the environment."""
    try:
        import s3fs
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        sys.exit(
            f"The object store of this benchmark needs a package that is not installed ({error}). "
            "Install the tools of development: pip install -e '.[dev]'; or leave the uploads out: "
            "--no-upload"
        )
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        s3fs.S3FileSystem().mkdir(BUCKET)
        yield
    finally:
        server.stop()


def prepare_text(out: Path) -> Path:
    """A small dataset with `train` and `valid`."""
    text, data = out / "text", out / "data"
    text.mkdir(parents=True, exist_ok=True)
    for name in MODULES:
        (text / name).write_bytes((Path(sysconfig.get_paths()["stdlib"]) / name).read_bytes())
    prepare_dataset([text], data, PrepareSettings(split={"valid": 0.3}, block_bytes=4096))
    return data


class Training:
    """A run directory, its copy at a URL, and the calls of `txl train` that work on it.

    A run has legs of STEPS_PER_LEG steps, each with its own command and number of lanes.
    """

    def __init__(self, path: Path, data: Path, *, num_steps: int, uploads: bool) -> None:
        self.path = path
        self.url = f"s3://{BUCKET}/{path.name}" if uploads else None
        self.log = path.with_suffix(".log")
        """Output of all calls."""
        self._trace, self._legs_done = path.with_suffix(".trace"), path.with_suffix(".legs")
        self._last_steps = [*range(STEPS_PER_LEG, num_steps, STEPS_PER_LEG), num_steps]
        overrides = (
            f"data.path={data}",
            f"directory={path}",
            f"training.checkpoint_url={json.dumps(self.url)}",
        )
        allowed = ("--allow-change", "training.num_steps", "--allow-change", "data.num_lanes")
        words = ("train", CONFIG, *overrides, *SETTINGS, *allowed,
                 "--on", "processes", "--ranks", NUM_RANKS)  # fmt: skip
        self._command = [sys.executable, "-m", "txl_dist", *map(str, words)]

    @property
    def _leg(self) -> int:
        return int(self._legs_done.read_text()) if self._legs_done.exists() else 0

    @property
    def is_finished(self) -> bool:
        return self._leg == len(self._last_steps)

    def end_leg(self) -> None:
        """The next call begins the next leg."""
        self._legs_done.write_text(str(self._leg + 1))

    @contextmanager
    def started(self) -> Iterator[psutil.Popen]:
        """Call `txl train`. On exit no process of it is left, except a sender that delivers."""
        self._trace.unlink(missing_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", TRACE_VARIABLE: str(self._trace)}
        with self.log.open("ab") as log:
            leg = self._leg
            command = [
                *self._command,
                f"training.num_steps={self._last_steps[leg]}",
                f"data.num_lanes={LANES[leg % len(LANES)]}",
            ]
            process = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def reached(self) -> list[Reached]:
        """The points that the ranks of the last call have reached."""
        return read_trace(self._trace)

    def count(self, point: str, *, rank: int = 0) -> int:
        """How often a rank of the last call has reached a point."""
        trace = self._trace.read_bytes() if self._trace.exists() else b""
        return trace.count(f" {rank} {point}\n".encode())

    @property
    def last_step(self) -> int:
        lines = lines_of(self.path / "metrics.jsonl")
        return json.loads(lines[-1])["step"] if lines else 0

    def lose_disk(self) -> None:
        """Remove the run directory, as if its machine was lost, with the senders on it."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "txl_dist.tracking.sender" in words and str(self.path) in words:
                process.send_signal(signal.SIGKILL)
                process.wait(TIMEOUT_SECONDS)
        shutil.rmtree(self.path, ignore_errors=True)  # it may not exist yet


def process_list(parent: Any, module: str) -> list[psutil.Process]:
    """Children of `parent` that run a module, in the order of their start."""
    found = []
    for child in parent.children() if parent.is_running() else []:
        try:
            if module in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda child: (child.create_time(), child.pid))


def wait_until(
    process: psutil.Popen, condition: Callable[[], bool], poll_seconds: float = 0.001
) -> None:
    """Wait for the condition or for the end of the process."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and not condition():
        require(time.monotonic() < deadline, f"pid {process.pid} made no progress")
        time.sleep(poll_seconds)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def lines_of(path: Path) -> list[str]:
    """The complete lines of a file that may not exist yet."""
    if not path.exists():
        return []
    return path.read_text().rpartition("\n")[0].splitlines()
