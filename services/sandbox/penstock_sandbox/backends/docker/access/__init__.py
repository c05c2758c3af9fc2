"""Access to containers."""
