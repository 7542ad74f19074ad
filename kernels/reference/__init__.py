"""Obviously right twins of every kernel for tests: float32 loops over single tokens and heads. CPUs draw with `gumbel` too."""
