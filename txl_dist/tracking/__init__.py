"""Tracking of a run on a server, which training never waits for.

    training loop -> journal.py: RUN/metrics.jsonl, complete in any case
    process.py    -> starts sender.py, a process; sends it the status at the end
    sender.py     -> which points the server lacks (journal.py); sends each once, through
                     tracker.py: the interface `Tracker` (start, recorded, log, end)
                     mlflow_tracker.py: MLflow
    txl eval      -> RUN/evaluations/: a score, which sender.py makes a run below its training run

`import txl_dist.tracking` imports no module.
"""
