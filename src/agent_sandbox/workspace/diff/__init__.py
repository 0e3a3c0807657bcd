"""Diffs of changes, made without trusting a byte of guest content.

compare.py    read both sides of a change into a `Preview`, a value
formats.py    turn previews into rows for people: unified, side by side, and a summary
patch.py      write a patch for `git apply`

Nothing here uses colours or a terminal: `cli` does.
"""
