"""The only code that knows how Flower calls us: Strategy, NumPyClient, ClientApp, mods and grids.

Translates between Flower's messages and the plain values of `client` and `server`, and holds nothing of
a method or of a round itself. Must not know a method by name. Imports nothing by itself: a ClientApp
process loads only what it uses.
"""
