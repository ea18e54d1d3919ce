"""The model. It imports torch, triton, numpy and this package only, so it can be tested alone.

    config.py               the architecture, checked without torch
    transformer_xl.py       tokens and memory -> loss per token and the next memory
      vocabulary.py         token ids to vectors, vectors to loss
      layer_parts.py        norms and feed-forward
      attention/            projections, and the implementations of attention
      encodings.py          how scores depend on distances
      visibility.py         which keys a query may see
      memory/               state between segments: in training, and a KV cache in inference
      dropout.py            masks by lane or by device
      kernels.py            triton's kernels of losses and masks
    token_step.py           one token per lane, with few operations

This file exports nothing, so that the config can be imported without torch.
"""
