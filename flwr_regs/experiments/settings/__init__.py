"""What a comparison's settings are, and how text becomes values."""
