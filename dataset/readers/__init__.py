"""Files of the user's own text, cut into blocks that worker processes can take."""
