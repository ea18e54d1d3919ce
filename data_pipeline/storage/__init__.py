"""Storage: files that appear whole or not at all, locks, JSON, and datasets behind URLs."""
