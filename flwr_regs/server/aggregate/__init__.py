"""From the replies to one update: weights, sums, robust means. Plain numpy."""
