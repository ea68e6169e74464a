"""One client's local training: the loop, its batches, its optimiser, its loss. Plain torch."""
