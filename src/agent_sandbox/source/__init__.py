"""WHAT DOES IT SAY?  Programs as text: trees, words, and what names stand for. Pure, and nothing of it is ever run or imported.

Two read programs: the router, which asks what a runtime must have, and code validation, which asks what is reached for. What both need is
here, so that a disguise that one of them sees through is none for the other.
"""
