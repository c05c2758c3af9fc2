"""A package: what its fixtures share ends with its last test and not with the run (pytest's scope `package`)."""
