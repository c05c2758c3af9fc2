"""What backends share whose sandboxes are machines elsewhere, which run commands for the service."""
