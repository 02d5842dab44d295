"""A guide to DeepSpeed's configuration that asks the release which keys it has.

Reading order: :mod:`~ds_config.source`, :mod:`~ds_config.releases`, :mod:`~ds_config.explain`.
"""
