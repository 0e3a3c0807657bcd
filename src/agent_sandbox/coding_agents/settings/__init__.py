"""The settings files of coding agents: what connecting changes in them, and how that is taken back."""
