"""Generated from the protos of penstock.options.v1."""
