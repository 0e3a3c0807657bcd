"""WHERE DOES IT RUN?  Kinds of isolation behind one small interface: a launch goes in, a guest comes out."""
