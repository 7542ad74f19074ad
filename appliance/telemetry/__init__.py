"""Readings of the machine and the engines, the sampler, and Prometheus metrics."""
