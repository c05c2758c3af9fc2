"""The guest agent: serves a sandbox from inside, or from beside it, where the service itself cannot reach in."""
