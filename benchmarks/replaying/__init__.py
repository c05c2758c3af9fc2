"""What a replay of a lost attempt costs, and branches of a rollout."""
