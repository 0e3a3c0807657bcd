"""Somebody is asked: the question, how it is shown, the inbox in which it waits, and the answer that is good for exactly that."""
