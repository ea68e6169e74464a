"""The comparison's models: `architectures` lists them, `layers` makes them, `models` chooses by the data.

The user's own come in at `models`; `layers` knows only layers.
"""
