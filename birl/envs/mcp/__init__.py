"""Tools of MCP servers for any environment: `env.mcp=[...]`. The session is the official client's (package `mcp`)."""
