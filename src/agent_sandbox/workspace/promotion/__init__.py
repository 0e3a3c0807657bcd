"""Carry changes over to the real tree: all or nothing, nothing of others lost, and back again.

`expecting` looks at the tree, `planning` decides, `promoting` does it, `recovery` ends what was interrupted, `undoing` takes it back.
"""
