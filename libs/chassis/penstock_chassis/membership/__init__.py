"""The services of one kind that a service works with: which there are, and which of them answer."""
