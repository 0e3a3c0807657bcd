"""Originals: the real state of each path when a layer first covered it. Merges are based on them; drift is measured against them.

An original is held in a `reality.Base`; the modules here call it a base.

runs.py       the begin and end records of a run
files.py      the files of bases and contents, their lines: recall, carry over, forget
capture.py    the walk through a layer at the end of a run, and the look at each real path

The order of a run: `since = begin(…)`, the guest runs and ends, `keep(…, since_ns=since)`, or `end` if the layer covers nothing. A run that
is killed before `keep` or `end` has no originals, and the next run detects that.
"""
