"""Show what would change, without trusting a byte of it."""
