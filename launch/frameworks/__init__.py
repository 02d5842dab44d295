"""Training programs for other frameworks, written as their users write them."""
