"""Tests of the readers in flwr_regs/experiments/sources, on a few records in each one's format."""
