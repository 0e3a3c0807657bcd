"""The layers that hold what a sandbox changed: how they stack, their history, and how changes are read back from them."""
