"""How much context a model uses: loss by context length, and RECL of a group of models.

    positions.py   split -> N sampled targets with enough tokens before them
    windows.py     a model's loss of a target after exactly c tokens
    losses.py      models x contexts x positions -> losses [M, C, N], one model in memory at a time
    recl.py        losses -> relative effective context length (numpy only)
    bootstrap.py   intervals, by document or by position
    report.py      recl.json and curve.csv
    plot.py        the curves and the relative gains

Compute RECL of losses that were measured elsewhere:

    lengths = relative_effective_context_length(losses_MCN, contexts, r=0.1)

Source: Dai et al. 2019, arXiv:1901.02860, section 4.3 and appendix C.
"""
