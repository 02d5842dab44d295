"""Many files to one pair: parts by worker processes, kept on disk, joined at the end."""
