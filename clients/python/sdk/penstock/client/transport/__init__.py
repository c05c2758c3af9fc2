"""Connections to the services: addresses, tokens, retries, tracing."""
