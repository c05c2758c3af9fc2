"""Tasks and task files."""
