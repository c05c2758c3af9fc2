"""Calls to other services."""
