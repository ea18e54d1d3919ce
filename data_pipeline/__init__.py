"""Corpora to shards, shards to lanes, lanes to segments. Knows nothing of models or devices."""
