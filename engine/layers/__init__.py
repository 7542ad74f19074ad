"""The parts of a decoder layer, built on `kernels.ops`. They know no request."""
