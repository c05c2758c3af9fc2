"""The gate's journal: rollouts, calls, agent keys and host tools."""
