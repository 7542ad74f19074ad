"""The administrator's pages: thin handlers over the services, HTML first, fragments for htmx. Knows no SQL."""
