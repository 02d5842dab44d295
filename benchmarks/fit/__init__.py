"""Fits the rates of a machine's profile to published figures of the paper's software."""
