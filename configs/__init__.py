"""What a run is: models, points and sweeps as TOML, checked by :mod:`configs.schema`."""
