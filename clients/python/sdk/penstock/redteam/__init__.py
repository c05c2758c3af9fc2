"""Attacks on a deployment, by agents that try what a policy could learn: `penstock doctor --attack`.

report = await redteam.run(ps)
assert report.held, [result for result in report.results if result.verdict is redteam.Verdict.BROKEN]
"""

from penstock.redteam.attack import Attack, AttackClass, Expected, Grading, registry, select
from penstock.redteam.judging import Result, Verdict
from penstock.redteam.runner import Report, run

__all__ = [
    "Attack",
    "AttackClass",
    "Expected",
    "Grading",
    "Report",
    "Result",
    "Verdict",
    "registry",
    "run",
    "select",
]
