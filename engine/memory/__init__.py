"""Memory of a device: what an engine will need of it, what fits, what would make it fit, and what was taken in the end."""
