"""`txl bench eval-speed`: reuse of states against a sliding window, per token."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli.options import AsJson
from txl_dist.cli.paths import local_path_parser

if TYPE_CHECKING:
    from txl_dist.bench.eval_speed import SpeedRow
    from txl_dist.model.config import ModelConfig
    from txl_dist.model.transformer_xl import TransformerXL


def eval_speed(
    attention_length: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens that each token attends to.")
    ] = "800,1800,2800,3800",
    tgt_len: Annotated[int, typer.Option(min=1, help="Segment of the reuse path.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each one times both paths once.")] = 5,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Measure this model instead of one with random weights.",
            parser=local_path_parser(),
        ),
    ] = None,
    n_layer: Annotated[int, typer.Option(min=1, help="Layers of the random model.")] = 4,
    d_model: Annotated[
        int,
        typer.Option(min=64, help="Width of the random model, a multiple of 64; heads have 64."),
    ] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, text and windows.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Time per token with reused states, and with a window that is read again for every token.

    Both paths run with the same weights, alternately, on a GPU or on one CPU thread, where CPU time
    counts. The ratio of times is compared with the ratio of their floating-point operations, and
    shown next to the paper's (arXiv:1901.02860, table 9: another model on a GPU, against a window
    path without the savings of this one). The share says how well reuse turns fewer operations into
    less time.

    Example: txl bench eval-speed --attention-length 800,1800 --tgt-len 64 --rounds 5
    """
    import torch

    from txl_dist.bench.eval_speed import bench_eval_speed
    from txl_dist.errors import ConfigError

    lengths = _lengths(attention_length)
    model = _stored(checkpoint) if checkpoint else _random(n_layer, d_model, seed)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    device = next(model.parameters()).device.type
    name = checkpoint or f"random weights, seed {seed}"
    if not as_json:
        _print_header(model.config, f"{name}", device)
    rows = []
    try:
        for row in bench_eval_speed(
            model, attention_lengths=lengths, tgt_len=tgt_len, rounds=rounds, seed=seed
        ):
            rows.append(row)
            if not as_json:
                _print_row(row)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if as_json:
        content = {
            "rows": [asdict(row) for row in rows],
            "model": {"name": str(name), **asdict(model.config)},
            "device": device,
            "threads": 1 if device == "cpu" else None,
        }
        print(json.dumps(content, allow_nan=False))


def _lengths(text: str) -> list[int]:
    from txl_dist.errors import ConfigError

    try:
        lengths = [int(word) for word in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"--attention-length {text!r}: expected numbers separated by commas")
    return lengths


def _stored(checkpoint: Path) -> "TransformerXL":
    from dataclasses import replace

    from txl_dist.convert.stored_model import find_model

    stored = find_model(checkpoint)
    # The benchmark chooses the memory.
    return stored.load(replace(stored.config, mem_len=0, same_length=False))[0]


def _random(n_layer: int, d_model: int, seed: int) -> "TransformerXL":
    """A model over 204 characters, as of enwik8, with the proportions of the paper's models."""
    from txl_dist.errors import ConfigError
    from txl_dist.model.config import ModelConfig
    from txl_dist.model.transformer_xl import TransformerXL

    if d_model % 64:
        raise ConfigError(f"--d-model {d_model} must be a multiple of 64, the width of a head")
    config = ModelConfig(
        vocab_size=204,
        n_layer=n_layer,
        d_model=d_model,
        n_head=d_model // 64,
        d_head=64,
        d_inner=4 * d_model,
        mem_len=0,
    )
    return TransformerXL(config, seed=seed)


def _print_header(config: "ModelConfig", name: str, device: str) -> None:
    clock = "CPU time of one thread" if device == "cpu" else "wall time"
    print(
        f"{name}: {config.n_layer} layers, d_model {config.d_model}, {config.n_head} x "
        f"{config.d_head} heads, d_inner {config.d_inner}, vocabulary {config.vocab_size}, "
        f"{config.distance_encoding}; {device}, {clock}"
    )
    print("ms per token: median (smallest-largest); share = time ratio / FLOP ratio")
    print(
        f"{'length':>6}  {'tgt_len':>7}  {'window ms':>24}  {'reuse ms':>22}  {'ratio':>7}  "
        f"{'paper':>6}  {'FLOPs':>7}  {'share':>6}  limit"
    )


def _print_row(row: "SpeedRow") -> None:
    from txl_dist.bench.eval_speed import MAX_SHARE

    low_window, high_window = row.spread_ms_window
    low_reuse, high_reuse = row.spread_ms_reuse
    window = f"{row.ms_per_token_window:,.1f} ({low_window:,.1f}-{high_window:,.1f})"
    reuse = f"{row.ms_per_token_reuse:.3f} ({low_reuse:.3f}-{high_reuse:.3f})"
    paper = f"{row.paper_ratio:,.0f}" if row.paper_ratio else "-"
    verdict = "holds" if row.holds else "MISSED"
    print(
        f"{row.attention_length:>6,}  {row.tgt_len:>7}  {window:>24}  {reuse:>22}  "
        f"{row.ratio:>7,.0f}  {paper:>6}  {row.flops_ratio:>7,.0f}  "
        f"{row.share_of_flops_ratio:>6.3f}  {row.limit:g} to {MAX_SHARE:g} {verdict}",
        flush=True,
    )
    print(
        f"{'':8}window: blocks of {row.block_len}, {row.windows} per batch, "
        f"{row.gflops_per_second_window:.1f} GFLOP/s; reuse: {row.lanes} lanes, "
        f"{row.gflops_per_second_reuse:.1f} GFLOP/s",
        flush=True,
    )
