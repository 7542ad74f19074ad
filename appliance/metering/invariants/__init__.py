"""What the ledger promises, proved on the rows of a database."""
