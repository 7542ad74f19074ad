"""Watches for alerts and sends the messages of the outbox as signed webhook requests and as e-mail."""
