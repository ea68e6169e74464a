"""What several methods share. No method is here."""
