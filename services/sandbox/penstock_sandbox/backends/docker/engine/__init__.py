"""The Docker daemon: requests and streams."""
