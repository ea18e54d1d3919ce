"""`txl bench recall`: the distances over which a trained model copies."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli.options import AsJson, Checkpoint, MemLen, TgtLen

if TYPE_CHECKING:
    from txl_dist.bench.recall import RecallProbe, RecallResult


def recall(
    checkpoint: Checkpoint,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="Take text from this dataset. Default: random token ids."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of --data.")] = "valid",
    distances: Annotated[
        str, typer.Option(metavar="N,N,...", help="Distances between the occurrences, in tokens.")
    ] = "16,32,64,128,256,512",
    span: Annotated[int, typer.Option(min=1, help="Tokens that are repeated.")] = 16,
    cue: Annotated[
        int, typer.Option(min=0, help="Tokens at the start of the repetition without a score.")
    ] = 4,
    sequences: Annotated[int, typer.Option(min=2, help="Sequences per distance.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of texts and intervals.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 16,
    tgt_len: TgtLen = None,
    mem_len: MemLen = None,
    as_json: AsJson = False,
) -> None:
    """Measure how far back a model finds the first occurrence of a repeated span of tokens.

    For each distance: the loss of the repeated span, the gain over the same text without the first
    occurrence, its 95 % interval over sequences, and its share of the loss.

    Example: txl bench recall runs/quickstart --data data/stdlib --distances 16,64,256
    """
    from dataclasses import asdict, replace

    import torch

    from data_pipeline.shards.manifest import load_manifest
    from data_pipeline.shards.shard_reader import open_split
    from data_pipeline.system.remote_path import dataset_path
    from txl_dist.bench.recall import RecallProbe, measure_recall, random_text, sampled_text
    from txl_dist.cli.progress import chunk_progress
    from txl_dist.context.windows import WindowScorer
    from txl_dist.convert.stored_model import find_model
    from txl_dist.errors import ConfigError

    stored = find_model(checkpoint)
    try:
        probe = RecallProbe(
            distances=tuple(int(word) for word in distances.split(",")),
            span=span,
            cue=cue,
            num_sequences=sequences,
            seed=seed,
        )
        new_mem_len = stored.config.mem_len if mem_len is None else mem_len
        config = replace(
            stored.config,
            mem_len=new_mem_len,
            same_length=stored.config.same_length and new_mem_len > 0,
        )
    except ValueError as error:
        raise ConfigError(f"{stored.path}: {error}") from None
    if data is not None:
        manifest = load_manifest(dataset_path(data))
        stored.check_data(manifest, dataset_path(data))
    model, tokenizer = stored.load(config)
    if data is None:
        excluded = [tokenizer.end_of_document] if tokenizer else []
        texts = random_text(probe, config.vocab_size, excluded=excluded)
    else:
        source = open_split(dataset_path(data), split, manifest=manifest)
        texts = sampled_text(probe, source, stored.reset)
    scorer = WindowScorer(
        model=model.to("cuda" if torch.cuda.is_available() else "cpu"),
        tgt_len=tgt_len or stored.tgt_len,
    )
    with chunk_progress(quiet=as_json) as on_progress:
        result = measure_recall(scorer, probe, *texts, batch_windows=batch, on_progress=on_progress)
    settings = {
        "checkpoint": str(stored.path),
        "text": data or "random tokens",
        "split": split if data else None,
        "tgt_len": scorer.tgt_len,
        "mem_len": config.mem_len,
        "max_context": scorer.max_context,
        **asdict(probe),
    }
    if as_json:
        print(json.dumps({**settings, **result.to_json()}, allow_nan=False))
    else:
        _print(probe, result, settings)


def _print(probe: "RecallProbe", result: "RecallResult", settings: dict[str, object]) -> None:
    from txl_dist.bench.recall import MIN_SHARE

    print(
        f"{settings['checkpoint']} on {settings['text']}: span {probe.span}, cue {probe.cue}, "
        f"{probe.num_sequences} sequences, seed {probe.seed}; tgt_len {settings['tgt_len']}, "
        f"mem_len {settings['mem_len']}, at most {settings['max_context']} tokens of context"
    )
    print(f"{'distance':>9}  {'nats/token':>10}  {'gain':>8}  {'95 % interval':>18}  {'share':>6}")
    for row in result.rows:
        ends = f"{row.low:.4f} to {row.high:.4f}"
        print(
            f"{row.distance:>9,}  {row.nats:>10.4f}  {row.gain:>8.4f}  {ends:>18}  "
            f"{row.share:>6.1%}"
        )
    print(f"{'control':>9}  {result.control_nats:>10.4f}  without the first occurrence")
    print(
        f"reach: {result.reach:,} tokens (every distance up to it gains at least {MIN_SHARE:.0%})"
    )
