"""The HTTP interface: the tenants' API, the administrators' API, health and metrics. Knows no SQL and no engine."""
