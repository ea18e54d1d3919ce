"""Model `txl` for lm-evaluation-harness (package `lm-eval`, extra `lm-eval` of txl-dist).

model.py:    the class that the harness calls: texts -> tokens, checks, results in their order
scoring.py:  what workers do: they score and continue batches of requests
__main__.py: the command line of the harness with model `txl`

The harness finds a model when its module is imported:

    python -m txl_dist.harness run --model txl --model_args checkpoint=RUN --tasks wikitext

    import txl_dist.harness.model
    lm_eval.simple_evaluate(model="txl", model_args={"checkpoint": "RUN"}, tasks=["wikitext"])
"""
