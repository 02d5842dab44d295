"""The report of a sweep, as Markdown and as one page that works offline."""
