"""The laws of a federated method, and `check_method`, which checks them for any method.

Knows all of the package below it, and Flower. Must not know a test runner, or any method by name but
FedAvg, with which the others are compared.

Offers ``check_method``, ``Exempt``, ``Method``, ``LAWS`` and ``LawBroken``.
"""

from flwr_regs.testing.check import LAWS, Report, check_method
from flwr_regs.testing.method import Exempt, Law, LawBroken, Method

__all__ = ["LAWS", "Exempt", "Law", "LawBroken", "Method", "Report", "check_method"]
