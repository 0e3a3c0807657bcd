"""Show what would change, without trusting a byte of it.

`compare` reads both sides of a change and gives a `Preview`, a value; `unified`, `side_by_side` and `summary` make rows of it for people,
`patch` makes what `git apply` takes. Nothing here has colours or looks at a terminal: surfaces do.
"""
