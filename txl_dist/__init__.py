"""Transformer-XL: model, training, evaluation, checkpoint, tracking and the `txl` command line."""
