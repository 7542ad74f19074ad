"""The `gatehouse` command. Speaks to the running appliance over HTTP, or to the same application in this process; no torch."""
