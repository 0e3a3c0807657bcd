"""IN WHAT ORDER?  Decide, record, act, record."""
