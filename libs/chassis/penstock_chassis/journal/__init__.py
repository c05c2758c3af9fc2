"""The journal: a service's durable state, one SQLite file with ordered writes."""

from penstock_chassis.journal.journal import Journal, SqlParams, SqlValue, Statement, refusal

__all__ = ["Journal", "SqlParams", "SqlValue", "Statement", "refusal"]
