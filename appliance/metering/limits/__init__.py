"""Whether a request may begin: buckets, windows and queues in memory, decided all or nothing. Knows no engine and no HTTP."""
