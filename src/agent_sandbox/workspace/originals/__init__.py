"""Originals: what was real when a layer first covered a path. A merge stands on them, and drift is measured against them.

records.py    how an original is written, one line each
runs.py       that a run begins and ends
files.py      recall, carry over, forget; the contents of files
capture.py    the walk through a layer at the end of a run, and the look at reality for each path

The order of a run: `since = begin(…)`, the guest runs and ends, `keep(…, since_ns=since)`, or `end` when nothing was covered. A run that is
killed in between has no originals, and the next one knows.
"""
