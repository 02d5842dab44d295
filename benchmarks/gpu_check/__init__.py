"""What a machine with a GPU is asked before anything else is measured on it: ``make gpu-check``.

See docs/gpu-check.md. The driver (:mod:`~benchmarks.gpu_check.driver` and what it imports) uses the
standard library alone, because one of its pieces installs the packages.
"""
