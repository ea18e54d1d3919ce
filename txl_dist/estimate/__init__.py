"""`txl estimate`: parameters, bytes of a rank, FLOPs and days of a run, before it starts.

    dry_run.py        parameters and activations: the model's code, run on tensors without data
    rank_bytes.py    bytes of a rank by ZeRO stage, with DeepSpeed's buffers
    run_estimate.py   all of it, for several numbers of GPUs, and the text

benchmarks/estimate_accuracy.py compares the bytes with real runs (docs/decisions/0030).
"""
