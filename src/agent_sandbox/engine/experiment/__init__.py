"""Experiments: several attempts at one thing, tried at once from the same frozen project, checked, compared, and the winner promoted.

`model` has the values and the order in which attempts are compared, and is pure; so are `reports` and `comparison`. `admission` decides how
many attempts run at once. `frozen_base` puts the frozen project into the view of a run. `conduct` runs the attempts, and `outcome` reads
what they changed and promotes it.
"""
