"""Adapter for task harness workers."""
