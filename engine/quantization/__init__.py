"""Weights in 8 and 4 bits and keys and values in 8: read from checkpoints, or made while a checkpoint is read."""
