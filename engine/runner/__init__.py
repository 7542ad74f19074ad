"""One loaded model on one device: weights, caches and the forward pass of a step."""
