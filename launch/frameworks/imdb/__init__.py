"""Sentiment of film reviews: a transformer encoder trained by Lightning, with or without ZeRO."""
