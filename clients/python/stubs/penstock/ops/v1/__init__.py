"""Generated from the protos of penstock.ops.v1."""
