"""Sandboxes on this machine: bubblewrap, overlayfs, namespaces, control groups. ``backend`` ties the parts together."""
