"""Tables and pictures of recorded runs."""
