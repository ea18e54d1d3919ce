"""The paper's experiments that `txl reproduce` repeats (`experiments.py`)."""
