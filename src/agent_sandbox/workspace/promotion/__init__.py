"""Promote changes to the real tree: all or nothing, without losing changes made by others, and reversible.

inspect.py    the tree before a promotion, and as it would be afterwards
plan.py       a change set into a plan of steps, without effects
promote.py    carry a plan out; finish interrupted promotions
target.py     the tree, as descriptors
staging.py    the staging directory
exchange.py   make moves, check the entries that come out of the tree, and take moves back
journal.py    the records of promotions on disk, and the replaced entries
undo.py       take a promotion back
"""
