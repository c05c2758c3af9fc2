"""Rollouts as values, the ports to other services, and the classification of failures by component at fault."""
