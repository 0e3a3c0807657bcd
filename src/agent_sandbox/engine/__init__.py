"""The order of each action: decide, record the intent, act, record the outcome."""
