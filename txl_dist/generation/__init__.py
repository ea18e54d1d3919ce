"""Text from a model, token by token, with its memory."""
