"""Replays traffic through the product's scheduler and caches under a virtual clock. Knows no torch and no appliance."""
