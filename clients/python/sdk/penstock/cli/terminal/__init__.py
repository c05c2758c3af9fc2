"""The terminal: output, whole screens and keys."""
