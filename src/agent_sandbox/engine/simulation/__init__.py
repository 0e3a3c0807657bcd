"""Simulate a command: run it on a throw-away clone, show its effects as a plan, and apply the plan."""
