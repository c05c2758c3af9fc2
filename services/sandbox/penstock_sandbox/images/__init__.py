"""OCI images without a daemon: pulled from registries, unpacked once per layer, kept within a limit."""
