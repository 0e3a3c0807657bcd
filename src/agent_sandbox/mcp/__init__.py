"""The MCP server: one stored sandbox of a project, offered to a model as tools.

Everything that the model does happens in the sandbox. Real files are changed by `promote` alone, and only after a person's answer. The
package `mcp` (the extra `mcp`) is imported by `server` and `transports` only, when the server starts.
"""
