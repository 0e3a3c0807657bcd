"""Diffs of changes, made without trusting a byte of guest content.

compare.py    read both sides of a change into a `Preview`, a value
formats.py    rows, hunks and marked words; unified, side-by-side and summary rows for people
patch.py      a patch for `git apply`

Nothing here uses colours or a terminal: `cli` does.
"""
