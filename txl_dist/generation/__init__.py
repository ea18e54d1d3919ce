"""Text generation: prompts to text, one token at a time, for one prompt or a batch.

batch_decoder.py: prompts -> token ids, one lane of a batch per prompt
options.py:       sampling options and the limits of a text
sampling.py:      logits -> token: temperature, top-k, top-p
text.py:          token ids -> text, character by character; finds stop strings
generate.py:      the functions to call: tokens of one prompt, texts of many
prompt_file.py:   a file of prompts, one per line
"""
