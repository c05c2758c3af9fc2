"""Calls to the sandbox service and the gate."""
