"""What a client keeps between rounds, and where. Plain torch."""
