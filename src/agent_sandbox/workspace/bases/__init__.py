"""What was real when a layer first covered a path: the base that a merge stands on, and the measure of drift.

lines.py      how it is written
runs.py       that a run begins and ends
files.py      recall, carry over, forget
contents.py   what files held
keeping.py    the walk through a layer at the end of a run
keeper.py     the look at reality, for one path
origin.py     which real directory an overlay looked into

The order of a run: `since = begin(…)`, the guest runs and ends, `keep(…, since_ns=since)`, or `end` when nothing was covered. A run that is
killed in between has no bases, and the next one knows.
"""
