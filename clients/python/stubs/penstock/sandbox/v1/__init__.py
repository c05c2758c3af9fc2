"""Generated from the protos of penstock.sandbox.v1."""
