"""A rank exits with the decided code, although the interpreter's shutdown would abort it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("code", [0, 75])
def test_the_shutdown_of_the_interpreter_does_not_change_the_exit_code(code: int) -> None:
    program = (
        "import atexit, os, sys\n"
        "from data_pipeline.processes.process_exit import exit_without_teardown\n"
        "atexit.register(os.abort)\n"  # like a native thread during the shutdown
        "print('buffered', end='')\n"
        f"exit_without_teardown({code})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, stdout=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stdout) == (code, "buffered")
