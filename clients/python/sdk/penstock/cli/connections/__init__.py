"""Connections of commands to the services, and the options for them."""
