"""Text generation: prompts to text, one token at a time, for one prompt or a batch.

text.py:     what a user gives and gets: options, prompts, stop strings, text (imports no torch)
generate.py: the functions to call, and the decoder: a lane per prompt; top-k, top-p, temperature
"""
