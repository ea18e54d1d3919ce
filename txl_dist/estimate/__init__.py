"""`txl estimate`: memory, time, communication and checkpoints of a run, before it starts.

    dry_run.py        parameters and activations: the model's code, run on tensors without data
    live_memory.py    counts the tensors that are alive, for dry runs and real ones
    memory.py         memory of a rank by ZeRO stage
    communication.py  collectives of a step, and their time on rings and trees
    checkpoint.py     size, interval and goodput
    limits.py         what grows with the ranks, and where it becomes a problem
    zero_settings.py  DeepSpeed's settings that these depend on
    data_facts.py     vocabulary and length of the run, from the dataset
    assumptions.py    the machines
    run_estimate.py   all of it, for several numbers of GPUs
    report.py         prints it

The figures are compared with real runs by benchmarks/estimate_accuracy.py (memory) and
benchmarks/estimate_links.py (time of a step). docs/decisions/0030-estimates.md says why they are
computed in this way.
"""
