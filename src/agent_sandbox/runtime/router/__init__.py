"""Choose the cheapest runtime that gives the required guarantees and can run the work. Pure: reads code as text, never runs or imports it.

`route.route` decides, `route.explain` gives the reasons as lines, `model.Candidate` describes a runtime as a value, and `route.lack_in`
recognises a run that should start again elsewhere. Reading code is guessing. A wrong guess may cost time, never a guarantee: guarantees are
compared first, with those that the runtime gives, not with what the code seems to do.
"""
