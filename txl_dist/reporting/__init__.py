"""Reports on a trained model: its attention by distance, as data and as plots."""
