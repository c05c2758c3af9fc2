"""`penstock mcp`."""
