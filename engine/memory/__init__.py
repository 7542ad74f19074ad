"""Memory of a device: what an engine will need, whether it fits, what would make it fit, and what it took in the end."""
