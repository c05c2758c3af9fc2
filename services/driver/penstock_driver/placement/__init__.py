"""Where each attempt at a rollout runs: on which sandbox service and at which gate."""
