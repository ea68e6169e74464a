"""The layers of the comparison's models, one file for each family.

Each function takes what the data says (shape, classes or vocabulary) and returns a :class:`Body`: the
layers up to the output layer, and how many features they make. It draws weights from torch's random
state. `models` chooses one by the data, or takes a user's own; the other files know only layers.
"""
