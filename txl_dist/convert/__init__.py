"""Weights from other programs, and models to give to others.

other_programs.py: .npz of the paper's code, directory of transformers -> their config and tensors
conversion.py:     config -> ModelConfig, tensors -> checked -> TransformerXL
stored_model.py:   the export format (txl export, txl import), and `find_model`: a checkpoint or an
                   exported model, for evaluation and generation
"""
