"""What is billed for a month: lines from sums of events, numbers, allowances, and how an invoice looks."""
