"""What a prepared dataset is on disk: written, read, checked, copied."""
