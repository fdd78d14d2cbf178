"""Training of the bundled demo models and of draft heads."""
