"""Rollouts for an asynchronous trainer: `ps.stream`, its policies, and the meter of what they prefer."""
