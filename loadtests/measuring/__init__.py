"""What is measured, how much of it counts, and the objectives for it."""
