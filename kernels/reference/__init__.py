"""Simple, obviously correct twins of every kernel, for tests: loops over single tokens and heads."""
