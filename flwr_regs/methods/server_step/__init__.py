"""Methods that change how the server weighs updates and steps."""
