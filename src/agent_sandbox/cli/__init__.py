"""WHO IS ASKING?  The command line and, later, the daemon, the MCP server and the web page.

Only here is the environment read and text printed.
"""
