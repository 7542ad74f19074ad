"""The service around the engine: tenants, keys, quotas, ledger, HTTP API, console and command line. Never imports torch."""
