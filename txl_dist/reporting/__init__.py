"""Looking inside a trained model: what it attends to, as data and as pictures."""
