"""The model. It imports torch, triton and this package only, so it can be tested alone.

    config.py, variants.py    the architecture, checked without torch
    transformer_xl.py         tokens and memory -> loss per token and the next memory
      embedding.py, adaptive_softmax.py     token ids to vectors, vectors to loss
        cluster_targets.py, chunked_cross_entropy.py    its rows by cluster, and bounded memory
      layers.py               attention and feed-forward with residuals and norms
        attention.py          projections; the form that runs: {reference,cpu,sdpa}_attention.py
        encodings.py          how scores depend on distances
      visibility.py           which keys a query may see
      memory.py, kv_cache.py  state between segments, in training and in inference

This file exports nothing, so that the config can be imported without torch.
"""
