"""Text to token ids and back, in one place."""
