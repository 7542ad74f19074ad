"""The web console: thin handlers over the services; whole HTML pages, and fragments for htmx. Knows no SQL."""
