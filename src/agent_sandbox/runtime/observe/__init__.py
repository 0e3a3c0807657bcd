"""Observe what a guest tries: its system calls decoded, and its DNS questions answered with addresses that lead nowhere."""
