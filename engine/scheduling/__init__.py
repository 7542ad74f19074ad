"""The scheduler: which requests compute which tokens in the next step, and in which KV blocks. Integers only, no torch."""
