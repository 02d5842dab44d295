"""Text to ids: byte-level BPE and SentencePiece, from local files alone."""
