"""Removes containers, images and a runtime's leftovers."""
