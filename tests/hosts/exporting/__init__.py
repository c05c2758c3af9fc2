"""Rollouts that drivers store as they end, at a place that fails, dies and comes back.

`store` is the place, `run` has the scenario, `account` what was found and what must be true of it.
"""
