"""Promote changes to the real tree: all or nothing, without losing changes made by others, and reversible.

inspect.py    read the real tree before a promotion, and work out the tree as it would be afterwards
plan.py       turn a change set into a plan of steps, without effects
promote.py    carry a plan out; finish interrupted promotions
target.py     open the directories of the real tree safely
staging.py    prepare the new entries in the staging directory
exchange.py   exchange prepared entries with those of the tree, check each, and take exchanges back
journal.py    keep the records of promotions on disk, and the replaced entries
undo.py       undo a promotion
"""
