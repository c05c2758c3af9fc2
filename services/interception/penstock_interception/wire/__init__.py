"""Conversion of values from and to protobuf messages, for servicers and outgoing calls."""
