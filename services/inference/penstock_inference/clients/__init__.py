"""Calls to other services: the engines of the same pool."""
