"""Training parity: trains the same model as the original code and compares the scores.

    python benchmarks/learns_like_the_original.py TEXT --seeds 0 1 2

TEXT is one UTF-8 file. The first 90 % of its bytes train the model of
`configs/learns-like-the-original.yaml`; the rest is scored with memory and without memory. The
reference figures were measured with the original code on 60 Wikipedia articles (WikiText-2's
validation file) and apply to that text only.

The data differs in one point: each part begins with our end-of-document token. It is never a
target, so both programs score the same bytes.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from txl_dist.checkpoint.directory import resolve_checkpoint
from txl_dist.config.config_file import load_run_config
from txl_dist.evaluation.distributed import evaluate
from txl_dist.evaluation.scores import bits_per_byte
from txl_dist.evaluation.spec import EvaluationSettings, EvaluationSpec
from txl_dist.launch.processes import ProcessLauncher
from txl_dist.training.spec import TrainSpec

CONFIG = Path(__file__).parents[1] / "configs" / "learns-like-the-original.yaml"
WITH_MEMORY, WITHOUT_MEMORY, TOLERANCE = 2.939, 2.980, 0.02
"""The original's bits per byte with memory 64 (spread over seeds 0.006) and without memory."""


def main() -> None:
    """Train and score every seed; exit 1 if the mean differs from the original's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="UTF-8 text, in one file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train, valid = prepare_parts(arguments.text, Path(folder))
        print("| seed | bits per byte, memory 64 | memory 0 |\n|---|---|---|", flush=True)
        rows = []
        for seed in arguments.seeds:
            run = train_seed(seed, train, Path(folder) / f"run-{seed}")
            rows.append((score(run, valid, mem_len=64), score(run, valid, mem_len=0)))
            print(f"| {seed} | {rows[-1][0]:.4f} | {rows[-1][1]:.4f} |", flush=True)
    sys.exit(0 if summarise(rows) else 1)


def prepare_parts(text: Path, folder: Path) -> tuple[Path, Path]:
    """Datasets of the first 90 % of the bytes and of the rest, one document each."""
    content = text.read_bytes()
    cut = len(content) * 9 // 10
    while content[cut] & 0xC0 == 0x80:  # never inside a character
        cut -= 1
    datasets = []
    for name, part in (("train", content[:cut]), ("valid", content[cut:])):
        (folder / f"{name}.txt").write_bytes(part)
        datasets.append(folder / f"data-{name}")
        prepare_dataset([folder / f"{name}.txt"], datasets[-1], PrepareSettings())
    return datasets[0], datasets[1]


def train_seed(seed: int, data: Path, run: Path) -> Path:
    """Train with one rank in a separate process; returns the checkpoint."""
    config = load_run_config(CONFIG, [f"seed={seed}", f"data.path={data}", f"directory={run}"])
    spec = TrainSpec(config=config, resume="never")
    ProcessLauncher().train(spec, num_ranks=1, on_line=lambda line: print(line, file=sys.stderr))
    return resolve_checkpoint(run)


def score(checkpoint: Path, data: Path, *, mem_len: int) -> float:
    """Bits per byte of the whole dataset, read in one stream, 64 tokens at a time."""
    settings = EvaluationSettings(
        split="train",  # the name of a dataset's only split
        mode="exact",
        tgt_len=64,
        mem_len=mem_len,
        clamp_len=None,
        same_length=False,
        reset="stream",
    )
    spec = EvaluationSpec(checkpoint=checkpoint, data=data, settings=settings, batch_chunks=8)
    return bits_per_byte(evaluate(spec).sums.named)


def summarise(rows: list[tuple[float, float]]) -> bool:
    """Print mean and range next to the original's; True if the mean with memory agrees."""
    with_memory, without = (list(column) for column in zip(*rows, strict=True))
    mean = statistics.fmean(with_memory)
    spread = max(with_memory) - min(with_memory)
    print(f"| mean | {mean:.4f} | {statistics.fmean(without):.4f} |")
    print(f"| largest - smallest | {spread:.4f} | {max(without) - min(without):.4f} |")
    print(f"| the original | {WITH_MEMORY} | {WITHOUT_MEMORY} |")
    agrees = abs(mean - WITH_MEMORY) <= TOLERANCE
    print(f"\n{'as' if agrees else 'NOT as'} the original: {WITH_MEMORY} ± {TOLERANCE} with memory")
    return agrees


if __name__ == "__main__":
    main()
