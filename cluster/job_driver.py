"""The driver of a job, on the cluster: `python -m cluster.job_driver --root DIR -- train ...`.

Ray starts it in the unpacked working directory (cluster/jobs.py). It runs the txl command as a
child process in the root directory (this module again, without --root: `txl`, but it ends when the
driver has ended), and prints the exit code, because Ray does not keep that of a stopped job.

Stop signals are ignored here: Ray sends them to every process of the job, the command included.
"""

import os
import subprocess
import sys
from pathlib import Path

from data_pipeline.system.signals import StopSignals, end_with_parent
from txl_dist.errors import ConfigError, print_error

COMMANDS = ("train", "prepare", "eval")
"""The txl commands that can be jobs."""
EXIT_LINE = "txl job: exit code "
"""The last line of a job's log, followed by the code."""


def main() -> int:
    """Run the command of this process's arguments; return its exit code."""
    if sys.argv[1] in COMMANDS:
        from txl_dist.__main__ import main as run_command

        end_with_parent(0)  # the driver holds the other end of standard input
        run_command()
        return 0
    _, root, _, *words = sys.argv[1:]
    with StopSignals(on_repeat=lambda: None):
        code = run_job(words, root=Path(root))
    print(f"{EXIT_LINE}{code}", flush=True)
    return code


def run_job(words: list[str], *, root: Path) -> int:
    """Run `txl WORDS...` in `root`; return its exit code, or 128 + the number of its signal."""
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
    if words[0] == "train" and (package / words[1]).is_file():  # else it is a name
        words = ["train", str(package / words[1]), *words[2:]]
    command = [sys.executable, "-P", "-m", "cluster.job_driver", *words]
    # The pipe stays open, and tells the command when this process has ended.
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
