"""Sweeps without running them: predicted from a machine's rates, beside published values."""
