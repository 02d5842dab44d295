"""Logs to tables: read what a run printed, judge its loss, and compare two runs.

``log`` reads, ``compare`` judges, ``report`` shows. What ``quick-parse-results.py`` takes from them
uses the standard library alone, so that it runs on a machine without any environment.
"""
