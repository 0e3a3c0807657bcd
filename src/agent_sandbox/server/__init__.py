"""WHO IS ASKING?  What outlives one command: the daemon of a user, and the processes that hold sessions with a timeline.

The daemon performs command lines in processes that are ready; its first lines in a command are `cli.errand`. Nothing here is loaded by a
command line, unless its verb is about it.
"""
