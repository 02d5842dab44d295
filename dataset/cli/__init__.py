"""The commands behind ``python -m dataset``."""
