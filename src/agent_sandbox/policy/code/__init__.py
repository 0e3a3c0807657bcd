"""WHAT DOES THE CODE REACH FOR?  An early warning, before anything runs. Never the wall: that is the runtime.

Patterns are matched against what a program means, as far as its text shows, and not against its letters: `eval(` in a comment is nothing,
and `getattr(__builtins__, "ev" + "al")` is. Who wants to hide from a reader of text always can; who does not want to is told early, in
words, what this sandbox will refuse anyway.
"""
