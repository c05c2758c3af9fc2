"""Host tools: tools that trainers' hosts offer to agents, and the calls to them. Independent of gRPC and MCP."""
