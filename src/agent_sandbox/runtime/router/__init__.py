"""The cheapest runtime that gives what is asked for and can run the work. Pure: reads code as text, runs and imports nothing of it.

`route.route` decides, `route.explain` says why in lines, `hosts` describes the runtimes as values, `forward.lack_in` recognises the end of
a run that should start again elsewhere. Reading code is guessing: a wrong guess may cost time, never a guarantee, because guarantees are
compared first and with what the runtime proved, not with what the code seems to do.
"""
