"""WHAT HAPPENED?  The ledger, an append-only record: an intent before each action, an outcome after it."""
