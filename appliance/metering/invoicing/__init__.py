"""Monthly invoices: lines computed from usage events, numbering, free allowances, and rendering as PDF and CSV."""
