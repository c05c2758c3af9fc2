"""The rollouts of the gate: opened, closed, kept in memory or on disk, answered and read."""
