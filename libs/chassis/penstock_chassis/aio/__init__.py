"""One of each for asyncio: retries, owned tasks, shared work, repeated requests, events, deletions that are retried."""
