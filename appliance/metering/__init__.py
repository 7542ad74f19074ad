"""Limits, prices, the usage ledger, invoices and reports: what tenants may use, have used and owe. Knows no HTTP and no
engine."""
