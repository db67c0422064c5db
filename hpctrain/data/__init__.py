"""Text to tokens, tokens to batches."""
