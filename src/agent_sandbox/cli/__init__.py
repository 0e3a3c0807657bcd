"""WHO IS ASKING?  The command line.

Only this folder prints. Besides it, only `assembly` and `selftest` read the environment.
"""
