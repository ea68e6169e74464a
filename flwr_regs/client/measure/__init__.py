"""What is measured over a client's data: features, Fisher information, means. Plain torch."""
