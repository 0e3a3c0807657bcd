"""Promote changes to the real tree: all or nothing, without losing changes made by others, and reversible.

inspect.py    the tree before a promotion, and as it would be afterwards
plan.py       a change set into a plan, without effects
steps.py      steps, moves and metadata, as values
promote.py    carry a plan out
target.py     the tree, as descriptors
staging.py    the staging directory
exchange.py   make moves, and take them back
verify.py     check the entries that come out of the tree
journal.py    the records of promotions on disk
backup.py     keep the replaced entries
recovery.py   finish interrupted promotions
undo.py       take a promotion back
"""
