"""Billing a month: invoice lines from sums of events, numbers, allowances, and the look of an invoice."""
