"""The sandbox service: lifecycle of sandboxes, processes in them, files, networks, leases."""
