"""What leaves a sandbox, and whether it may."""
