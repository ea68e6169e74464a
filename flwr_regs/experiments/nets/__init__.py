"""The layers of the comparison's models, one file for each family.

Each function takes what the data says (shape, classes or vocabulary) and returns a :class:`Body`: the
layers up to the output layer, and how many features they make. It draws weights from torch's random
state. This folder knows layers; it must not know a data set by name, a setting or a seed, as `models` does.
"""
