"""Generated from the protos of penstock.trajectory.v1."""
