"""The Flower app that ``flwr run .`` runs: data, partitions, models, the comparison and its report."""
