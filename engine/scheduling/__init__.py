"""Who computes what in the next step, and with which KV blocks: integers only, no torch."""
