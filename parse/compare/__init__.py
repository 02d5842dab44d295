"""Runs beside one another: whether they train alike, and only then how much faster."""
