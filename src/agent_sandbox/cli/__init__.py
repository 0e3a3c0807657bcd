"""WHO IS ASKING?  The command line.

Only this folder prints. Besides it, only `assembly`, `selftest` and `server` read the environment.
"""
