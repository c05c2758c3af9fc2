"""Live sandboxes: admission, leases, limits and teardown."""
