"""Show what would change, without trusting a byte of it.

compare.py    read both sides of a change into a `Preview`, a value
window.py     the part in which two files differ
sources.py    the old side of a change
rows.py       rows, hunks and marked words: the parts of a printed diff
formats.py    unified, side-by-side and summary rows for people
patch.py      a patch for `git apply`

Nothing here uses colours or a terminal: `cli` does.
"""
