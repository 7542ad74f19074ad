"""Decoder families: what differs between them is a table, what they share is one decoder."""
