"""`txl` and `python -m txl_dist`: catches stop signals before anything slow is imported."""

import sys
from contextlib import nullcontext

from data_pipeline.processes.stop_signals import StopSignals
from txl_dist.runtime.stop_request import end_start_up


def main() -> None:
    """Run one command. SIGTERM and its kin in the start-up of `txl train` end it with 75."""
    is_training = sys.argv[1:2] == ["train"]
    with StopSignals(on_request=end_start_up) if is_training else nullcontext():
        from txl_dist.cli.app import main as run_command

        run_command()


if __name__ == "__main__":
    main()
