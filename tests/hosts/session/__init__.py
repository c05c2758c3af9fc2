"""One session of a trainer over all gates, of which one restarts and one is lost.

`run` has the scenario, `agents` those who ask, `trainer` the one who answers, `account` what they saw and what must be
true of it.
"""
