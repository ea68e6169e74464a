"""What travels: names, bytes, precision, codes, and the checks on arrival; both ends use it.

Knows arrays by name and the protocol. Must not know who sends what to whom, a term, or torch at import:
a ClientApp process loads it before the user's code. Only `records` knows Flower, and of it only its
record types; `client` and `server` use the other modules.
"""
