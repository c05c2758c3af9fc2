"""Conversions between values and protobuf messages."""
