"""What methods consist of that is no method: what several share, and codes."""
