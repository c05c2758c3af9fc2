"""Backends create the sandboxes. ``domain.backend`` is their interface; each module or package here is one backend."""
