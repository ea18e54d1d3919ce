"""The driver of a job, on the cluster: `python -m cluster.job_driver --root DIR -- train ...`.

Ray starts it in the unpacked working directory (cluster/jobs.py). It runs the txl command as a
child process in the root directory (this module again, without --root: `txl`, but it ends when the
driver has ended), and

1. copies the command's output to RUN/logs/driver.log: Ray keeps it on the node of the driver only;
2. after a failure, prints the last lines of the logs of the ranks that the error names;
3. prints the exit code, because Ray does not keep that of a stopped job.

Stop signals are ignored here: Ray sends them to every process of the job, the command included.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from data_pipeline.system.signals import StopSignals, end_with_parent
from txl_dist.cli.job_request import COMMANDS, EXIT_LINE
from txl_dist.config.redaction import redact
from txl_dist.errors import ConfigError, PreemptedError, print_error

NUM_RANK_LINES = 15
"""Printed of the log of each rank that failed."""
MAX_RANKS = 3
"""Ranks of which the last lines are printed."""
DRAIN_SECONDS = 5.0
"""Time limit for the rest of the output, once the command has ended."""


def main() -> int:
    """Run the command of this process's arguments; returns its exit code."""
    if sys.argv[1] in COMMANDS:
        from txl_dist.__main__ import main as run_command

        end_with_parent(0)  # the driver holds the other end of standard input
        run_command()
        return 0
    parser = argparse.ArgumentParser(prog="cluster.job_driver")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--log", type=Path)
    parser.add_argument("words", nargs="+", metavar="WORD")
    options = parser.parse_args()
    with StopSignals(on_repeat=lambda: None):
        code = run_job(options.words, root=options.root, log=options.log)
    print(f"{EXIT_LINE}{code}", flush=True)
    return code


def run_job(words: list[str], *, root: Path, log: Path | None) -> int:
    """Run `txl WORDS...` in `root`; returns its exit code, or 128 + the number of its signal."""
    package = Path.cwd()
    try:
        os.chdir(root)
    except OSError as error:
        message = (
            f"{root} cannot be used on node {os.uname().nodename} of the cluster "
            f"({error.strerror}). Relative paths of data, runs and checkpoints begin there, so it "
            "must be on storage that all nodes see. Give another: txl job submit --root DIR"
        )
        print_error(ConfigError(message))
        return ConfigError.exit_code
    if words[0] == "train":  # the config is a file of the package
        words = ["train", str(package / words[1]), *words[2:]]
    start = time.time()
    command = [sys.executable, "-P", "-m", "cluster.job_driver", *words]
    with ExitStack() as stack:
        copy = _open_log(log, stack)
        if copy is not None:  # the file has the output of all attempts
            header = f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(words)}"
            _write_line(header.encode(), copy, to_output=False)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        last_lines: deque[bytes] = deque(maxlen=NUM_RANK_LINES)
        arguments = (process.stdout, copy, last_lines)
        reader = threading.Thread(target=_copy_output, args=arguments, daemon=True)
        reader.start()
        code = process.wait()
        reader.join(DRAIN_SECONDS)  # a child of the command may still hold the pipe
        if code not in (0, ConfigError.exit_code, PreemptedError.exit_code) and log is not None:
            text = b"".join(last_lines).decode(errors="replace")
            for line in failed_rank_lines(log.parent, text, since=start):
                _write_line(line.encode(), copy)
    return code if code >= 0 else 128 - code


def failed_rank_lines(logs: Path, error: str, *, since: float) -> list[str]:
    """The last lines of the logs of the ranks that `error` names, if written after `since`."""
    ranks = list(dict.fromkeys(map(int, re.findall(r"\brank (\d+)\b", error))))
    lines = []
    for rank in ranks[:MAX_RANKS]:
        path = logs / f"rank-{rank}.log"
        if path.exists() and path.stat().st_mtime >= since:
            tail = path.read_text("utf-8", errors="replace").splitlines()[-NUM_RANK_LINES:]
            lines += [f"--- last lines of {path}", *map(redact, tail)]
    return lines


def _open_log(path: Path | None, stack: ExitStack) -> IO[bytes] | None:
    """The file for the copy. Without one the command reports why its directory is unusable."""
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(path.open("ab", buffering=0))
    except OSError as error:
        print(f"no copy of this output in {path}: {error.strerror}", flush=True)
        return None


def _copy_output(source: IO[bytes], copy: IO[bytes] | None, last_lines: deque[bytes]) -> None:
    for line in source:
        last_lines.append(line)
        _write_line(line.rstrip(b"\n"), copy)


def _write_line(line: bytes, copy: IO[bytes] | None, *, to_output: bool = True) -> None:
    for file in filter(None, (sys.stdout.buffer if to_output else None, copy)):
        try:
            file.write(line + b"\n")
            file.flush()
        except OSError:
            continue  # a full disk must not block the command


if __name__ == "__main__":
    sys.exit(main())
