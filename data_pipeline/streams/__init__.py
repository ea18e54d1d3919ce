"""Who reads what, and in which order: lanes of endless text."""
