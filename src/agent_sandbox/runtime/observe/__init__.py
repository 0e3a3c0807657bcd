"""Observe a guest: decode its system calls, and answer its DNS queries with addresses that lead nowhere."""
