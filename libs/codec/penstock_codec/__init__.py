"""Text to token ids and back: chat templates, exact continuation, tool-call and reasoning parsers."""
