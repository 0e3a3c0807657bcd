"""WHAT DOES IT ASK FOR?  Read programs and command lines as text. Pure: never runs, imports or looks up any of it.

The early check, the router and the program rules share these readers, so that all of them see through the same disguises.
"""
