"""Environments: the prepared snapshots that rollouts are forked from, and the cleanup of sandboxes after rollouts."""
