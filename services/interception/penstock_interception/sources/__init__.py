"""Who answers where the trainer does not: inference services and OpenAI-compatible endpoints."""
