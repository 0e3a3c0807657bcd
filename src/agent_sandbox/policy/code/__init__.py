"""WHAT DOES THE CODE REACH FOR?  An early warning, before anything runs. Never the security boundary: that is the runtime.

Patterns are matched against the meaning of a program, as far as its text shows, not against its letters: `eval(` in a comment is no match,
and `getattr(__builtins__, "ev" + "al")` is. Hostile code can always hide from such a check. Other code gets an early explanation of what
this sandbox will refuse anyway.
"""
