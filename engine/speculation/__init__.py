"""Guesses of several tokens per step that the model verifies, without changing what it would have written. No torch."""
