"""Read a git repository without running git."""
