"""OCI images: pulled and unpacked without a daemon; and what each backend adds to an image for its sandboxes."""
