"""Rollouts that go on after their driver, their gate or their attempt was lost: what is recorded for that, and its use."""
