"""One loaded model on one device: caches, inputs of a step, forward passes in several ways, sampling, the draft model."""
