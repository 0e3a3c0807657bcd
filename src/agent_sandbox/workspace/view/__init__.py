"""The view of a guest: turn file rules and the machine's mounts into a mount plan. Nothing is mounted here."""
