"""Originals: the real state of each path when a layer first covered it. Merges and the detection of drift compare with them.

An original is held in a `reality.Base`; the modules here call it a base.

runs.py       write the begin and end records of a run
files.py      write and read the files of bases and contents; carry bases over, and forget them
capture.py    walk through a layer at the end of a run, and record the real state of each new path

The order of a run: `since = begin(…)`, the guest runs and ends, `keep(…, since_ns=since)`, or `end` if the layer covers nothing. A run that
is killed before `keep` or `end` has no originals, and the next run detects that.
"""
