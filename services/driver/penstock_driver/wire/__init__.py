"""Converts values to and from protobuf messages."""
