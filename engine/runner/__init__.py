"""One loaded model on one device: caches, inputs of a step, its forward pass in one of several ways, and a draft model's."""
