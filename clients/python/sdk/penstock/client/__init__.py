"""The Python client of Penstock."""
