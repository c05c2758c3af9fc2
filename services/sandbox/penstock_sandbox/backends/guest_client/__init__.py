"""Shared by all backends whose sandboxes have a guest agent (``penstock_sandbox.guest``)."""
