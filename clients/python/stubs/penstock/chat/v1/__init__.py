"""Generated from the protos of penstock.chat.v1."""
