"""WHAT HAPPENED?  The append-only record: an intent before each action, an outcome after it."""
