"""What models use and how runs went: context curves and RECL, attention, plots, the page of a run.

    recl.py         the relative effective context length of a group of models (`txl recl`)
    windows.py      a model's losses of sampled targets after exactly c tokens
    attention.py    attention of every head by distance (`txl attention`)
    run_report.py   the HTML page of a run directory, or of several compared (`txl report`)
    run_status.py   what runs are doing now (`txl status`)
    bench.py        what reusing states saves, and how far back a model copies (`txl bench`)
    model_card.py   what a checkpoint, its run and its data tell (`txl export --format hf`)
    plots.py        all figures; no other module imports matplotlib

Compute RECL of losses that were measured elsewhere:

    lengths = relative_effective_context_length(losses_MCN, contexts, r=0.1)
"""
