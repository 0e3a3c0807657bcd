"""WHERE DOES IT RUN?  Kinds of isolation behind one small interface: `launch` takes a launch and returns a running guest."""
