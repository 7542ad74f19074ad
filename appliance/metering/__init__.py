"""What tenants may use, have used and owe: limits, prices, the ledger and its reports. Knows no HTTP and no engine."""
