"""What goes between server and clients in a round: requests, messages, checked replies. Plain numpy."""
