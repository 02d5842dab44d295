"""What ails a run, from its log alone: ``python -m parse diagnose LOG...``.

One pass over each log. :mod:`~parse.diagnose.steps` reads the figures of a step from a line,
whatever framework printed it; the watchers (``training``, ``memory``, ``speed``, ``setup``,
``failures``) keep what they need of the lines, never the lines; ``illnesses.toml`` has the words
and the remedies.
"""
