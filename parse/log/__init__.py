"""A log and what lies beside it, read into records."""
