"""Plans of anything at all, for Hypothesis."""

from __future__ import annotations

import os

from hypothesis import strategies as st

from agent_sandbox.engine.simulation.plan import EffectPlan, Ended, FileEffect, Input, NetworkRequest, Prediction, ProgramUse, SecretUse
from agent_sandbox.engine.simulation.risk import Level, Risk

# As names come from the system: text, and bytes that are none.
names = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.binary(max_size=20).map(os.fsdecode))
risks = st.builds(Risk, st.sampled_from(Level), names)
numbers = st.integers(0, 1 << 40)
files = st.builds(
    FileEffect, names, names, names, names, numbers, target=names, sha256=names, xattrs=st.just((("user.x", "00"),)), risk=risks
)
plans = st.builds(
    EffectPlan,
    command=st.lists(names, max_size=3).map(tuple),
    cwd=names,
    project=names,
    created=st.floats(0, 2e9),
    governed=names,
    base=names,
    ended=st.builds(Ended, st.integers(0, 255), names, risk=risks),
    files=st.lists(files, max_size=3).map(tuple),
    programs=st.lists(st.builds(ProgramUse, names, numbers, st.booleans(), risks), max_size=2).map(tuple),
    network=st.lists(st.builds(NetworkRequest, names, names, names, risk=risks), max_size=2).map(tuple),
    secrets=st.lists(st.builds(SecretUse, names, names, names, risk=risks), max_size=2).map(tuple),
    predicted=st.lists(st.builds(Prediction, names, names, risks), max_size=2).map(tuple),
    read=st.lists(st.builds(Input, names, names), max_size=2).map(tuple),
    words=st.lists(names, max_size=2).map(tuple),
    watched=st.booleans(),
)
