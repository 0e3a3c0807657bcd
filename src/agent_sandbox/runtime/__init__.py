"""WHERE DOES IT RUN?  Families of isolation behind one small interface: a launch goes in, a process comes out."""
