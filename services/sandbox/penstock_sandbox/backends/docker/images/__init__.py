"""Prepares images for sandboxes."""
