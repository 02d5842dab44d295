"""The corpus that needs no download, and the cache its token files lie in."""
