"""From a corpus to shards: scan, assign, write, each in work units."""
