"""Methods that are terms of other methods, composed: what a paper names is a class here."""
