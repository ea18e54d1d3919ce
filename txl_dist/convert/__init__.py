"""Weights from elsewhere: the original's and transformers' files, and one file to hand on."""
