"""How much was asked for, used and owed: limits, prices, the ledger and its reports. Knows no HTTP and no engine."""
