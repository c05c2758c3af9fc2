"""The inference service: `ps.inference`."""
