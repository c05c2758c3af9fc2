"""The gate: queues, leases, budgets and results of model calls."""
