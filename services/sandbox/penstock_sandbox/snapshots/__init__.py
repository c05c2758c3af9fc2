"""Snapshots and forks."""
