"""The Flower app that ``flwr run .`` runs; all that it does is in `flwr_regs.experiments`."""
