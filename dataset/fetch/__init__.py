"""Files that lie on the web: what they are, and how they get here."""
