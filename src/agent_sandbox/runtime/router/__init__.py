"""Choose the cheapest runtime that gives the required guarantees and can run the work. Pure: reads code as text, never runs or imports it.

`route.route` decides, `route.explain` gives the reasons as lines, `model.Candidate` describes a runtime as a value, and `route.lack_in`
recognises a run that should start again elsewhere. What the text of code shows is only a guess. A wrong guess may cost time, never a
guarantee: the guarantees of each runtime are compared with the required ones first.
"""
