"""Predicts an iteration from measured rates: time by phase, memory, and what binds. No torch."""
