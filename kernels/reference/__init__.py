"""Obviously right twins of every kernel: float32 loops over single tokens and heads, for tests. CPUs draw with `gumbel` too."""
