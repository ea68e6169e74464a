"""The only code that knows how Flower calls us: Strategy, NumPyClient, ClientApp, mods and grids.

Translates between Flower's messages and the plain values of `client` and `server`. Must not know a
method by name, or what happens inside a round. This file imports nothing, so that a ClientApp process
loads only what it uses.
"""
