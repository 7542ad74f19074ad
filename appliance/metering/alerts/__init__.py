"""Which alerts go out, and to whom: thresholds, the outbox, webhooks and their signatures. Sends nothing itself."""
