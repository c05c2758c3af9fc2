"""The services as processes on this machine."""
