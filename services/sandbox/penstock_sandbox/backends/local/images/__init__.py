"""Images as the base of local sandboxes."""
