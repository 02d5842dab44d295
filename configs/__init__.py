"""Runs as data: models, points and sweeps as TOML, checked by :mod:`configs.schema`."""
