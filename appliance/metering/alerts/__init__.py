"""What is told to the outside, and to whom: thresholds, the outbox, webhooks and their signatures. Sends nothing itself."""
