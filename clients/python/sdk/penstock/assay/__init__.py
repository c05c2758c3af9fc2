"""Whether tasks are fit to train on: `assay` tries a task's solution, its verifier and what its agents can read.

docs/guides/assay.md describes what is tried, and what each finding means.
"""

from penstock.assay.model import Assay, Code, Finding, Kind, Severity, Trial
from penstock.assay.runner import Terms, assay

__all__ = ["Assay", "Code", "Finding", "Kind", "Severity", "Terms", "Trial", "assay"]
