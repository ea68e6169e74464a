"""The server side of ``flwr run .``: the comparison that the run config describes."""

from flwr_regs.experiments.run import server_app as server

app = server.app  # an assignment: Flower looks for one before it imports the file
