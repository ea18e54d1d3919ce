"""Datasets and checkpoints of a run in MLflow: its inputs, and its LoggedModels.

MLflow has no request that creates a model only once. A model is identified by the run that wrote it
(`source_run_id`) and the tag MODEL_KEY: `record_models` reads the models of the run, and then adds
and removes what differs. So it can be repeated after a call whose response was lost, and a model
that was created twice is removed.

A removed model is only hidden (`lifecycle_stage: deleted`) until `mlflow gc`.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from urllib.parse import urlsplit

from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelInput,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
)
from mlflow.tracking import MlflowClient

from txl_dist.tracking.tracker import Point, TrackedDataset, TrackedModel

MODEL_KEY = "txl.save_id"
MAX_DIGEST_LENGTH = 36
"""MLflow's limit. The whole digest is in the profile."""
MAX_KEY_LENGTH = 250
_ILLEGAL_IN_KEY = re.compile(r"[^\w.\- :/]")
_CONTEXT = "mlflow.data.context"
_ILLEGAL_IN_MODEL_NAME = str.maketrans("/:.%\"'", "______")


def record_inputs(
    client: MlflowClient, run_id: str, datasets: Sequence[TrackedDataset], model_id: str | None
) -> None:
    """Record what a run reads. MLflow ignores inputs that the run has."""
    inputs = [DatasetInput(_entity(each), [InputTag(_CONTEXT, each.context)]) for each in datasets]
    models = [LoggedModelInput(model_id)] if model_id else None
    if inputs or models:
        client.log_inputs(run_id, inputs, models)


def _entity(dataset: TrackedDataset) -> Dataset:
    scheme = urlsplit(dataset.source).scheme
    kind = {"": "local", "https": "http"}.get(scheme, scheme)
    profile = {**dataset.profile, "sha256": dataset.digest}
    schema = None
    if dtype := profile.get("dtype"):
        tensor = {"name": "token_ids", "type": "tensor"}
        tensor |= {"tensor-spec": {"dtype": dtype, "shape": [-1]}}  # type: ignore[dict-item]
        features = {"features": json.dumps([tensor]), "targets": None}
        schema = json.dumps({"mlflow_tensorspec": features})
    return Dataset(
        name=dataset.name,
        digest=dataset.digest[:MAX_DIGEST_LENGTH],
        source_type=kind,
        source=json.dumps({"url" if kind == "http" else "uri": dataset.source}),
        schema=schema,
        profile=json.dumps(profile),
    )


def clean_key(key: str) -> str:
    """`key` with the characters that MLflow allows, and without `.` and `..` as path components."""
    parts = [part for part in _ILLEGAL_IN_KEY.sub("_", key).split("/") if part.strip(".")]
    return "/".join(parts)[:MAX_KEY_LENGTH].rstrip("/") or "_"


def metrics_of(
    points: Sequence[Point], model_id: str | None = None, dataset: TrackedDataset | None = None
) -> list[Metric]:
    """The finite points of a run, which are also metrics of a model on a dataset."""
    link = {"model_id": model_id}
    if dataset is not None:
        link |= {"dataset_name": dataset.name, "dataset_digest": dataset.digest[:MAX_DIGEST_LENGTH]}
    return [
        Metric(clean_key(p.metric), p.value, p.milliseconds, p.step, **link)
        for p in points
        if math.isfinite(p.value)
    ]


def find_model(client: MlflowClient, run_id: str, key: str) -> str | None:
    """The id of the model with this key that the run has; None without one."""
    experiment_id = client.get_run(run_id).info.experiment_id
    found = _models_of(client, experiment_id, run_id).get(key)
    return found[0].model_id if found else None


def record_models(client: MlflowClient, run_id: str, models: Sequence[TrackedModel]) -> None:
    """Let the models of a run in MLflow be these, with their scores. May be repeated."""
    run = client.get_run(run_id)
    present = _models_of(client, run.info.experiment_id, run_id)
    wanted = {model.key for model in models}
    for key, found in present.items():
        for obsolete in found[1:] if key in wanted else found:
            client.delete_logged_model(obsolete.model_id)
    outputs = {output.model_id for output in run.outputs.model_outputs} if run.outputs else set()
    for model in models:
        if model.key in present:
            logged = present[model.key][0]
        else:
            logged = client.create_logged_model(
                run.info.experiment_id,
                name=model.name.translate(_ILLEGAL_IN_MODEL_NAME),
                source_run_id=run_id,
                tags={MODEL_KEY: model.key, **model.tags},
                params=dict(model.params),
                model_type="checkpoint",
            )
        _complete(client, run_id, logged, model, is_output=logged.model_id in outputs)
        _record_scores(client, run_id, logged, model)


def _complete(
    client: MlflowClient, run_id: str, logged: LoggedModel, model: TrackedModel, *, is_output: bool
) -> None:
    if logged.status != LoggedModelStatus.READY:
        client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
    if not is_output:
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, model.step)])
    tags = {key: value for key, value in model.tags.items() if logged.tags.get(key) != value}
    if tags:
        client.set_logged_model_tags(logged.model_id, tags)


def _record_scores(
    client: MlflowClient, run_id: str, logged: LoggedModel, model: TrackedModel
) -> None:
    recorded = {(metric.key, metric.step, metric.timestamp) for metric in logged.metrics or ()}
    metrics = metrics_of(model.scores, logged.model_id, model.scored_on)
    new = [m for m in metrics if (m.key, m.step, m.timestamp) not in recorded]
    if new:
        # MLflow records metrics of a model only together with those of a run. The run has these
        # points already: it does not store a point with the same name, step, time and value twice.
        client.log_batch(run_id, metrics=new)


def _models_of(
    client: MlflowClient, experiment_id: str, run_id: str
) -> dict[str, list[LoggedModel]]:
    """The models that a run has written, by key, the oldest first."""
    models: dict[str, list[LoggedModel]] = defaultdict(list)
    token = None
    while True:
        page = client.search_logged_models(
            [experiment_id],
            f"source_run_id = '{run_id}'",
            order_by=[{"field_name": "creation_timestamp", "ascending": True}],
            page_token=token,
        )
        for model in page:
            if (key := model.tags.get(MODEL_KEY)) is not None:
                models[key].append(model)
        if not (token := page.token):
            return models
