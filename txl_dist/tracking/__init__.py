"""Tracking of a run in MLflow, which training never waits for.

    training loop -> journal.py: RUN/metrics.jsonl, complete in any case
    tracker.py    -> starts and restarts sender.py, a process; sends it the status at the end
    sender.py     -> delivery.py: which points the MLflow run lacks; sends each once
                       -> mlflow_run.py: the MLflow run and its description
                       -> mlflow_client.py: the only import of mlflow
    txl eval      -> evaluation.py: a score as a child run

`state.py` has what these processes exchange. `import txl_dist.tracking` imports no module.
"""
