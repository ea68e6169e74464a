"""The client side of ``flwr run .``: one partition's data, and a client of the server's method."""

from flwr_regs.experiments.run import clients

app = clients.app  # an assignment: Flower looks for one before it imports the file
