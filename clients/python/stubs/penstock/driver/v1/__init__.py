"""Generated from the protos of penstock.driver.v1."""
