"""WHAT DOES IT ASK FOR?  Read programs and command lines as text. Pure: nothing of them is run, imported or looked up.

The early check, the router and the rules on programs all read through here, so that a disguise that one sees through hides from none.
"""
