"""The agents' side: HTTP in the agents' dialects."""
