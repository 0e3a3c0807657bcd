"""WHAT WOULD IT DO?  Run a command on a throw-away clone, show its effects as a plan, and apply the plan."""
