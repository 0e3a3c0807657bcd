"""The hook contracts of coding agents, one file for each program."""
