"""Checks the ledger's invariants on the rows of a database."""
