"""Backends for the frameworks that people write agents with, one module each. Import the one that you use; nothing is imported here.

Each stands in front of one sandbox, in which the framework's commands and files see the same state. The real files stay as they are: each
adapter has a `workspace`, whose changes a person reviews and promotes once the adapter is closed.
"""
