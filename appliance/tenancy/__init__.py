"""Who may use the appliance: tenants and their keys, members and their sessions, administrator tokens, roles."""
