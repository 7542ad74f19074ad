"""The administrator's pages: thin route handlers over the services, HTML first, fragments for htmx. Knows no SQL and no engine."""
