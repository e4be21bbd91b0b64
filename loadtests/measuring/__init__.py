"""What is measured, how much of it counts, and what it is held to."""
