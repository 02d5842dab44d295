"""Peaks of process memory: predicted beside measured."""
