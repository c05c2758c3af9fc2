"""Generated from the protos of penstock.interception.v1."""
