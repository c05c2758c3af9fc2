"""Model sources, which answer where the trainer does not: inference services and OpenAI-compatible endpoints."""
