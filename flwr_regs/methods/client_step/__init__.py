"""Methods that change the clients' gradients, and what clients and server tell each other for that."""
