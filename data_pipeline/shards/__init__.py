"""Prepared datasets on disk: writing, reading, verifying, rebuilding and copying them."""
