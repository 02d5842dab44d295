"""What a point needs and what a machine has: memory and time."""
