"""The training stream: epoch order, lanes and segments of one corpus or a mixture."""
