"""The usage events, their only writer and their sums: pending, then posted, voided or recovered."""
