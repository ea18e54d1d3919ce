"""Measures a group of stored models on one split: the computation of `txl recl`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.shards.manifest import load_manifest
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.streams.segments import Reset
from data_pipeline.tokenizers.comparison import differences
from txl_dist.context.analysis import analyse_group
from txl_dist.context.losses import measure_losses, useful_contexts
from txl_dist.context.positions import sample_positions
from txl_dist.context.recl import check_contexts
from txl_dist.context.report import GroupReport, ModelDescription
from txl_dist.context.windows import WindowScorer, max_context
from txl_dist.convert.stored_model import StoredModel, find_model
from txl_dist.errors import ConfigError, DataError
from txl_dist.evaluation.evaluate import EvaluationJob


@dataclass(frozen=True, kw_only=True, slots=True)
class ReclRequest:
    """What `txl recl` measures. All jobs have the same data and split."""

    group: str
    """Published with the result, because RECL depends on the group."""
    names: tuple[str, ...]
    jobs: tuple[EvaluationJob, ...]
    """One per model; the batch size counts windows."""
    contexts: tuple[int, ...]
    r_values: tuple[float, ...]
    threshold: float
    num_positions: int
    num_resamples: int
    seed: int


def check_group(request: ReclRequest) -> None:
    """Check everything that can be checked before weights are loaded.

    Raises ConfigError for invalid options; DataError if tokenizers differ, among models or from the
    data.
    """
    if len(set(request.names)) < len(request.names):
        raise ConfigError(f"the models need different names, got {', '.join(request.names)}")
    if bad := [r for r in request.r_values if not 0 < r <= 1]:
        raise ConfigError(f"--r {bad[0]:g} must be above 0 and at most 1")
    models = [find_model(job.checkpoint, weights=job.weights) for job in request.jobs]
    _require_one_tokenizer(models)
    data = request.jobs[0].data
    manifest = load_manifest(data)
    for model in models:
        model.check_data(manifest, data)


def measure_group(
    request: ReclRequest, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> GroupReport:
    """Losses of every model at every context, their curves and RECL.

    Calls `on_progress(tokens read, tokens to read)`, first before anything is read. Holds one model
    in memory at a time. Raises DataError if no target has enough context, CheckpointError for
    damaged weights.
    """
    check_group(request)
    first = request.jobs[0]
    source = open_split(first.data, first.settings.split, manifest=load_manifest(first.data))
    within_documents = any(job.settings.reset == "document" for job in request.jobs)
    reset: Reset = "document" if within_documents else "stream"
    positions = sample_positions(
        source,
        context=request.contexts[-1],
        num_positions=request.num_positions,
        seed=request.seed,
        reset=reset,
    )
    losses, descriptions = [], []
    work = [tokens_per_target(job, request.contexts) * len(positions) for job in request.jobs]
    on_progress(0, sum(work))
    for number, (name, job) in enumerate(zip(request.names, request.jobs, strict=True)):
        scorer, description = _open(name, job)
        descriptions.append(description)
        losses.append(
            measure_losses(
                scorer,
                source,
                positions,
                request.contexts,
                batch_windows=job.batch_chunks,
                on_progress=_shared_progress(on_progress, work, number),
            )
        )
    delta = _fixed_step(request.contexts)
    analysis = analyse_group(
        np.stack(losses),
        request.contexts,
        positions.document_N,
        r_values=request.r_values if delta else (),
        threshold=request.threshold,
        max_contexts=[description.max_context for description in descriptions],
        num_resamples=request.num_resamples,
        seed=request.seed,
    )
    return GroupReport(
        group=request.group,
        data=str(first.data),
        data_sha256=source.manifest.digest,
        split=first.settings.split,
        contexts=request.contexts,
        delta=delta,
        threshold=request.threshold,
        num_positions=len(positions),
        num_documents=positions.num_documents,
        within_documents=within_documents,
        seed=request.seed,
        models=tuple(descriptions),
        analysis=analysis,
    )


def _require_one_tokenizer(models: list[StoredModel]) -> None:
    """Losses per token can be compared only if all models have the same tokens."""
    first = models[0]
    for model in models[1:]:
        if not model.tokenizer or not first.tokenizer:
            continue
        if changes := differences(model.tokenizer, first.tokenizer):
            raise DataError(
                f"the tokenizers of {model.path} and {first.path} differ: {changes}; a group needs "
                "one tokenizer, because its losses per token are compared. Compare models that "
                "were trained on the same prepared dataset"
            )


def _open(name: str, job: EvaluationJob) -> tuple[WindowScorer, ModelDescription]:
    stored, settings = find_model(job.checkpoint, weights=job.weights), job.settings
    model = job.open().model
    description = ModelDescription(
        name=name,
        checkpoint=str(job.checkpoint),
        digest=stored.digest,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        distance_encoding=model.config.distance_encoding,
        tgt_len=settings.tgt_len,
        mem_len=settings.mem_len,
        clamp_len=settings.clamp_len,
        same_length=settings.same_length,
        reset=settings.reset,
        precision=settings.precision,
        max_context=max_context(model.config, settings.tgt_len),
    )
    scorer = WindowScorer(model=model, tgt_len=settings.tgt_len, precision=settings.precision)
    return scorer, description


def tokens_per_target(job: EvaluationJob, contexts: Sequence[int]) -> int:
    """Tokens that a model reads to score one target after each of `contexts` tokens."""
    config = job.model_config(find_model(job.checkpoint, weights=job.weights).config)
    return sum(useful_contexts(contexts, max_context(config, job.settings.tgt_len)))


def _shared_progress(
    on_progress: Callable[[int, int], None], work: Sequence[int], number: int
) -> Callable[[int, int], None]:
    """Progress of model `number` as a part of the work of all models."""
    return lambda done, _: on_progress(sum(work[:number]) + done, sum(work))


def _fixed_step(contexts: tuple[int, ...]) -> int | None:
    try:
        check_contexts(contexts)
    except ValueError:
        return None
    return contexts[1] - contexts[0]
