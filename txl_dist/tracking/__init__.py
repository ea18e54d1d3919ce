"""Tracking of a run on a server, which training never waits for.

    training loop -> journal.py: RUN/metrics.jsonl, complete in any case
    process.py    -> starts sender.py, a process; sends it the status at the end
    sender.py     -> which points the server lacks (comparison.py); sends each once, through
                     tracker.py: the interface `Tracker` (start, recorded, log, end)
                     mlflow_tracker.py: MLflow; mlflow_models.py: its datasets and models
    checkpoints.py   the checkpoints that exist, as models of the run
    txl eval      -> RUN/evaluations/: evaluations.py, a score as a run below its training run

`import txl_dist.tracking` imports no module.
"""
