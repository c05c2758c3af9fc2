"""The driver's journal: rollouts, their events and their summaries."""
