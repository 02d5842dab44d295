"""Explains, mends and advises DeepSpeed's configuration, with the keys of the installed release."""
