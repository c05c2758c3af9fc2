"""The values of the gate: rollouts, calls, sessions, budgets, agent keys."""
