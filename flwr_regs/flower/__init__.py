"""The only place in the package that talks to Flower."""
