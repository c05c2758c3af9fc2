"""The operators' view: health checks, and a snapshot of the gate."""
