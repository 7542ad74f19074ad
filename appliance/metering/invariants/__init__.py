"""Checks the ledger's promises on the rows of a database."""
