"""WHAT HAPPENED?  An append-only record: the intent before the deed, and how it ended."""
