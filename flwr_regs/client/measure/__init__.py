"""What is measured over a client's data: features, Fisher information, accuracy. Plain torch."""
