"""Sends what stands in the outbox, as signed requests and as mail."""
