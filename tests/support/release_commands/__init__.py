"""A strict stand-in of `kubectl` and `helm`, for what runs them: a cluster in a directory, with real services in it."""
