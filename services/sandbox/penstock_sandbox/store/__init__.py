"""What survives a kill -9 of the service."""
