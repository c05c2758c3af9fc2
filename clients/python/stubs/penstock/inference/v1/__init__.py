"""Generated from the protos of penstock.inference.v1."""
