"""Finds out with a trial sandbox what a daemon can do."""
