"""Terminal episodes: a policy types shell commands into a sandbox itself, without an agent; its answer is graded."""
