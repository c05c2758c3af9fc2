"""Rollouts on a terminal and as JSON."""
