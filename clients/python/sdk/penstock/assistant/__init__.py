"""An MCP server for coding assistants over runs, rollouts, tasks and reports, read-only by default.

`server` speaks the protocol, `tools` are what an assistant may call, `answers` is what it gets: facts of Penstock's
own, and apart from them, fenced, the texts that agents, models, tasks and verifiers wrote.
"""
