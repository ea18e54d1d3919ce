"""Text generation, token by token: generate.py runs the model, sampling.py draws tokens."""
