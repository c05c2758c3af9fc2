"""What several suites start and wait for: a real stack, a policy that answers calls, deadlines instead of sleeps."""
