"""The live display of a run on a terminal of 80 columns."""

import os
import pty
import re
import subprocess
import sys

from tests.support.commands import ENVIRONMENT

SHOW = """
from txl_dist.cli.progress import run_progress
with run_progress(200, quiet=False) as on_line:
    on_line("12:00:00 step 100 | loss 3.4123 | ppl 30.30 | tok/s 12,345 | eta 0:01:40 | bpb 2.030"
            " | lr 1.00e-03 | grad 0.500 | mfu 55% | mem valid 100% | data wait 0.0%")
"""


def test_80_columns_show_the_speed_and_the_time_left() -> None:
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", SHOW], stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while block := os.read(ours, 4096):
            shown += block
    except OSError:
        assert shown  # Linux ends a terminal whose other side is closed with an error
    os.close(ours)
    assert process.wait(timeout=60) == 0
    plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    assert "50% step 100 | loss 3.4123 | ppl 30.30 | tok/s 12,345 | eta 0:01:40" in plain
