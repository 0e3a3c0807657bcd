"""WHAT WOULD A COMMAND LINE DO?  The tools it asks for and their effects, read from its text. Pure: nothing is run or looked up.

It explains and predicts. What it says of a command decides nothing by itself about what the command can do: the view does, in which a tool
that is not allowed is not there, however it is spelt. So what is not understood is said to be unknown, never guessed to be harmless.
"""
