"""Logs to tables: read what a run printed, judge its loss, and compare two runs.

``records``, ``log_name``, ``log_lines``, ``metrics``, ``verdict`` and ``compare`` use the standard
library alone, so that ``quick-parse-results.py`` runs on a machine without any environment.
"""
