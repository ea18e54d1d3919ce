"""A rank ends with the decided exit code, whatever the interpreter would do at its shut-down."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("code", [0, 75])
def test_nothing_of_the_shut_down_changes_the_exit_code(code: int) -> None:
    program = (
        "import atexit, os, sys\n"
        "from data_pipeline.processes.process_exit import exit_without_teardown\n"
        "atexit.register(os.abort)\n"  # as a native thread does that meets a closing interpreter
        "print('buffered', end='')\n"
        f"exit_without_teardown({code})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, stdout=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stdout) == (code, "buffered")
