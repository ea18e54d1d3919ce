"""Training: one build chain (build.py), one loop (loop.py), and what they are made of."""
