"""Calls from a program inside the sandbox to its host: tools, and the turns of a session."""
