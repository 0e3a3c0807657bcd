"""Records of deterministic runs: what one was given and what came of it, so that it can be run again and compared.

`record` is the value and its file, `tape` what is kept of output, `recorder` makes one while a run goes on, `comparing` says where a second
one departs from it.
"""
