"""Rollouts and groups: `ps.rollouts`, `ps.groups`."""
