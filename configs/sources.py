"""Where a figure comes from: column ``source`` of tables, ``measured`` where a table lacks it."""

MEASURED, SIMULATED, PUBLISHED = SOURCES = ("measured", "simulated", "published")
