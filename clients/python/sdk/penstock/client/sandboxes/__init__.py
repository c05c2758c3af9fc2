"""Standalone sandboxes: `ps.sandboxes`."""
