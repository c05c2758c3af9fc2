"""The data types of sandboxes, and the backend interface."""
