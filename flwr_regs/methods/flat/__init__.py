"""Methods that look for flat minima: gradients at a perturbed point."""
