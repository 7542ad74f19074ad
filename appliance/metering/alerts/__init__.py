"""Decides which alerts go to whom: threshold rules, the outbox, webhooks and their signatures. Sends nothing itself."""
