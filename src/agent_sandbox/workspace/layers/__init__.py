"""The layers that hold a sandbox's changes: how they stack, their history, and how changes are read back from them."""
