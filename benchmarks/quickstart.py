"""Real text to a trained, evaluated, tracked model: every part of the system, in a few minutes.

    make quickstart

The text is the source code of the Python standard library. Each step is one `txl` command, which is
printed before it runs. A second call reuses the prepared data. It resumes a stopped run, or starts
a new run if the last one has finished.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

SOURCES, DATA, RUNS = Path("data/stdlib-sources"), Path("data/stdlib"), Path("runs")
CONFIG = "configs/modern/quickstart.yaml"
STOPPED = 75
"""Exit code of a run that stopped on request."""
PROMPT = "def read_lines(path):\n"
ELSEWHERE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({path!r})
tokenizer = AutoTokenizer.from_pretrained({path!r})
ids = tokenizer(tokenizer.bos_token + {prompt!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=120)[0], skip_special_tokens=True))
"""


def main() -> None:
    """Run the commands and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="settings of the run: k.e.y=value")
    overrides = parser.parse_args().overrides
    collect_sources()
    txl("prepare", SOURCES, "--out", DATA, "--split", "valid=0.02,test=0.01",
        "--shuffle", 1, "--max-reject-rate", 0.02)  # fmt: skip
    run = choose_run()
    began = time.monotonic()
    txl("train", CONFIG, "--ranks", 2, f"directory={run}", *overrides)
    seconds = time.monotonic() - began
    say("the held-out split, with memory and without")
    evaluate = ("eval", run, DATA, "--split", "valid", "--workers", 2, "--json")
    with_memory = json.loads(txl(*evaluate, capture=True))
    without = json.loads(txl(*evaluate, "--mem-len", 0, capture=True))
    say("a sample")
    txl("generate", run, "--prompt", PROMPT, "--max-tokens", 300, "--temperature", 0.7)
    print_summary(run, seconds, with_memory, without)
    if find_spec("transformers") is not None:
        run_elsewhere(run)


def run_elsewhere(run: Path) -> None:
    """Continue the prompt by the exported model in transformers, without code of this project."""
    say("the same model in transformers")
    out = run / "for_transformers"
    txl("export", run, "--format", "transformers", "--out", out)
    script = ELSEWHERE.format(path=str(out), prompt=PROMPT)
    subprocess.run([sys.executable, "-c", script], check=True)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def txl(*words: object, capture: bool = False) -> str:
    """Print and run one command; exits with its code if it fails."""
    arguments = [str(word) for word in words]
    say(shlex.join(["txl", *arguments]))
    command = [sys.executable, "-m", "txl_dist", *arguments]
    # A launcher variable left in the environment would make the command act as a rank.
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # two ranks on the CPU, also on a machine with GPUs
    with subprocess.Popen(
        command, stdout=subprocess.PIPE if capture else None, text=True, env=environment
    ) as process:
        output = None
        while process.returncode is None:
            # Ctrl-C reaches the command too; wait until it has saved and stopped.
            with suppress(KeyboardInterrupt):
                output, _ = process.communicate()
    if process.returncode == STOPPED:
        say("stopped; make quickstart resumes from the newest checkpoint")
    if process.returncode:
        sys.exit(process.returncode)
    return output or ""


def collect_sources() -> None:
    """Copy the standard library's .py files to `SOURCES`, once."""
    if SOURCES.exists():
        return
    library = Path(sysconfig.get_paths()["stdlib"])
    say(f"copying the source code of the Python {sys.version.split()[0]} standard library")
    temporary = SOURCES.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if "site-packages" not in name.parts and path.stat().st_size > 0:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, temporary / name)
    temporary.rename(SOURCES)


def choose_run() -> Path:
    """The run directory: the newest if it can be resumed, else the next free one."""
    matches = (re.fullmatch(r"quickstart-(\d+)", path.name) for path in RUNS.glob("quickstart-*"))
    newest = max((int(match[1]) for match in matches if match), default=0)
    run = RUNS / f"quickstart-{newest}"
    if newest and not (run / "summary.json").exists():
        has_checkpoint = (run / "LATEST").exists()
        start = "its newest checkpoint" if has_checkpoint else "the beginning: it saved none"
        say(f"{run} has not finished: resuming from {start}")
        return run
    if newest:
        say(f"{run} has finished: starting a new run")
    return RUNS / f"quickstart-{newest + 1}"


def print_summary(
    run: Path, seconds: float, with_memory: dict[str, object], without: dict[str, object]
) -> None:
    """Print the scores, the speed and the path of the checkpoint."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    latest = (run / "LATEST").read_text().strip()
    summary = {
        "bits_per_byte_with_memory": with_memory["bits_per_byte"],
        "bits_per_byte_without_memory": without["bits_per_byte"],
        "targets_scored": with_memory["tokens_scored"],
        "tokens_per_second_median": rates[len(rates) // 2],
        "training_seconds_with_start": seconds,
        "checkpoint": str(run / latest),
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    gain = float(summary["bits_per_byte_without_memory"]) - float(
        summary["bits_per_byte_with_memory"]
    )
    say("summary")
    print(f"bits per byte, memory {with_memory['mem_len']:>4}   {with_memory['bits_per_byte']:.4f}")
    print(f"bits per byte, memory    0   {without['bits_per_byte']:.4f}")
    print(f"improvement by memory       {gain:.4f} bits per byte")
    rate = summary["tokens_per_second_median"]
    print(f"tokens per second           {rate:,.0f} (median of the log)")
    print(f"checkpoint                  {summary['checkpoint']}")
    database = f"sqlite:///{(RUNS / 'mlflow.db')}"
    print("MLflow page                 ", end="")
    print(
        shlex.join(
            [".venv/bin/mlflow", "ui", "--backend-store-uri", database, "--host", "127.0.0.1"]
        )
    )
    if gain <= 0:
        sys.exit("memory did not improve the score: the run was too short, or something is wrong")


if __name__ == "__main__":
    main()
