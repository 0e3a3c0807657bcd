"""Coding agents: the hook that sends their commands into the sandbox, and the settings that connect them.

`contracts/` has one file for each program: its tools, and the form of its answers. `settings/` has one for the configuration of each.
"""
