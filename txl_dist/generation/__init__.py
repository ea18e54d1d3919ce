"""Text generation: prompts to text, one token at a time, for one prompt or a batch.

text.py:     what a user gives and gets: options, prompts, stop strings, text (imports no torch)
decoder.py:  prompts -> token ids, one lane of a batch per prompt; top-k, top-p, temperature
generate.py: the functions to call: tokens of one prompt, texts of many
"""
