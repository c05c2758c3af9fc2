"""Backends create the sandboxes. ``domain.backend`` is their interface; each package here is one backend."""
