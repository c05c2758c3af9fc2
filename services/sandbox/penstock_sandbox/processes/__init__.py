"""Processes in sandboxes, and their output."""
