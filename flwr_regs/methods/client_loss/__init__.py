"""Methods that change the clients' loss."""
