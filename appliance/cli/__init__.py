"""The `gatehouse` command. Talks to the running appliance over HTTP, or to the same application in this process; no torch."""
