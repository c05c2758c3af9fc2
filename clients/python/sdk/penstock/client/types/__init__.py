"""Values that the services return."""
