"""`txl` and `python -m txl_dist`: handle stop signals before the slow imports start."""

import gc
import io
import sys
from contextlib import nullcontext

from data_pipeline.system.signals import StopSignals
from txl_dist.runtime.stop import exit_before_first_step


def main() -> None:
    """Run one command. A stop signal while `txl train` starts ends it with exit code 75."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Latin-1 and ASCII lack characters of texts, and names of files need not be UTF-8.
            stream.reconfigure(errors="backslashreplace")
    # Only training saves its state on a stop signal.
    is_training = sys.argv[1:2] == ["train"]
    with StopSignals(on_request=exit_before_first_step) if is_training else nullcontext():
        from txl_dist.cli.app import main as run_command

        try:
            run_command()
        finally:
            # The interpreter's last collections search all modules: a second with torch and Ray.
            gc.freeze()


if __name__ == "__main__":
    main()
