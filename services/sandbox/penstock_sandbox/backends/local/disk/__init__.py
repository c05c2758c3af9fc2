"""Limits on disk: quotas if the kernel has them, else measurement."""
