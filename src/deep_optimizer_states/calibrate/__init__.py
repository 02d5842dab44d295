"""Measures this machine's rates into a profile that ``plan --machine`` and ``auto`` read."""
