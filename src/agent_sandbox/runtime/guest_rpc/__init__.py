"""Calls from a program inside to its host: tools, and the turns of a session."""
