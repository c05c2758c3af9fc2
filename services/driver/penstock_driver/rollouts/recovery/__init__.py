"""Rollouts that go on after their driver, gate or attempt was lost: what is recorded for that, and its use."""
