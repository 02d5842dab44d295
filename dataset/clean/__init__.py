"""A crawl made fit for training: every step by choice, streaming, counted."""
