"""What is wrong with a request: everything at once, and not the first thing alone."""

from __future__ import annotations

from penstock_chassis.errors import InvalidArgument, Violation


class Findings:
    """The violations of one request, as they are found."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        """One more."""
        self.violations.append(Violation(field, description))

    @property
    def summary(self) -> str:
        """The first of them, in a line."""
        return "; ".join(f"{item.field}: {item.description}" for item in self.violations[:5])

    # Each reason stands where its error is made: the page of errors is checked against that.

    def refuse_rollout(self) -> None:
        """InvalidArgument (ROLLOUT_INVALID) with all of them, if there are any."""
        if self.violations:
            raise InvalidArgument(self.summary, reason="ROLLOUT_INVALID", violations=self.violations)

    def refuse_terminal(self) -> None:
        """The same of a terminal episode (TERMINAL_INVALID)."""
        if self.violations:
            raise InvalidArgument(self.summary, reason="TERMINAL_INVALID", violations=self.violations)

    def refuse_step(self) -> None:
        """The same of a step of it (STEP_INVALID)."""
        if self.violations:
            raise InvalidArgument(self.summary, reason="STEP_INVALID", violations=self.violations)
