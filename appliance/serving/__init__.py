"""Turns an admitted prompt into text: engines and their supervision, tokenisers, generations. Knows no HTTP."""
