"""Merge the changes of a sandbox with changes made in reality meanwhile. Pure: bytes and values in, values out.

*Ours* is the sandbox, *theirs* is reality, the *base* is the real state when the sandbox first covered a path.

text.py    merge two versions of a text; find the edits between two lists of lines
tree.py    merge two versions of a path; apply answers to conflicts
"""
