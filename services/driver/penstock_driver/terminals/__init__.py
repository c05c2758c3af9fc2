"""Terminal episodes: the policy itself types the commands, and an answer of its ends them."""
