"""IN WHAT ORDER?  Decide, record, act, record: the order that makes the other parts one product."""
