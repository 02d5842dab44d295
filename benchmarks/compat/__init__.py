"""What runs with which versions: ``make compat`` writes docs/compatibility.md."""
