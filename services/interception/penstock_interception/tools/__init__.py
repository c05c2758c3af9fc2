"""Host tools: what trainers' hosts offer to agents, and the agents' calls. Knows no wire: neither gRPC nor MCP."""
