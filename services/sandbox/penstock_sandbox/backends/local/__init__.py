"""Sandboxes on this machine: bubblewrap, overlayfs, namespaces, control groups. ``backend`` combines the parts."""
