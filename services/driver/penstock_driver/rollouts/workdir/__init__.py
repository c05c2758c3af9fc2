"""What an agent changed in a rollout's working directory."""
