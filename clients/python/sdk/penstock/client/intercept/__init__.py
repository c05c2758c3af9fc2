"""Answering agents' model calls: `ps.intercept`."""
