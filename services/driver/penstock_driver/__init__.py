"""The driver service: turns an agent spec and a task into a scored rollout. Knows no agent by name."""
