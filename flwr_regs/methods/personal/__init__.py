"""Methods with a model, or a part of one, for each client."""
