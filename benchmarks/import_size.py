"""Seconds and peak memory of an import of the size of Qwen3-0.6B, with random weights.

    python benchmarks/import_size.py DIR

DIR gets about 4 GiB of files, which are removed at the end. Prints the figures and their limit side
by side: one copy of the model in fp32, one tensor and what the program needs itself.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from txl_dist import TransformerXL
from txl_dist.convert.hub import write_for_transformers
from txl_dist.model.config import ModelConfig

SIZES = {
    "vocab_size": 151_936, "n_layer": 28, "d_model": 1024, "n_head": 16, "n_kv_head": 8,
    "d_head": 128, "d_inner": 3072, "rotary_base": 1e6, "tie_weight": True, "mem_len": 2048,
    "scale_embedding": False, "same_length": True,
}  # fmt: skip
"""Of the published config, with a window."""


def main() -> None:
    """Write a model, import it, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--write", action="store_true", help="only write the model")
    arguments = parser.parse_args()
    source, out = arguments.directory / "source", arguments.directory / "imported"
    if arguments.write:
        write(source)
        return
    # In another process: a child starts with the peak memory of its parent, which is measured.
    subprocess.run([sys.executable, __file__, arguments.directory, "--write"], check=True)
    with torch.device("meta"):
        parameters = [*TransformerXL(ModelConfig.of_recipe("modern", **SIZES)).parameters()]
    copy = sum(parameter.nbytes for parameter in parameters)
    largest = max(parameter.nbytes for parameter in parameters)
    command = [sys.executable, "-m", "txl_dist", "import", str(source), "--out", str(out), "--json"]
    seconds, peak, report = peak_of(command)
    _, program, _ = peak_of([sys.executable, "-c", "import txl_dist.convert.original_model"])
    print(f"{json.loads(report)['parameters']:,} parameters, {seconds:.1f} s")
    print(f"peak {peak / 2**30:.2f} GiB; limit {(copy + largest + program) / 2**30:.2f} GiB:")
    print(f"  a copy in fp32 {copy / 2**30:.2f}, a tensor {largest / 2**30:.2f}, "
          f"the program {program / 2**30:.2f}")  # fmt: skip
    for path in (source, out):
        shutil.rmtree(path)


def write(directory: Path) -> None:
    """A directory of transformers in bf16."""
    model = TransformerXL(ModelConfig.of_recipe("modern", **SIZES))
    write_for_transformers(
        directory, model, None, 128, window=2048, dtype=torch.bfloat16, card=None
    )


def peak_of(command: list[str]) -> tuple[float, int, str]:
    """Seconds, peak bytes and output of a process."""
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return time.monotonic() - start, usage.ru_maxrss * 1024, output


if __name__ == "__main__":
    main()
