"""Host tools for agents, over MCP."""
