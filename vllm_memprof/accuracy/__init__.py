"""What plans of published runs say about plans: rows of runs on hardware, errors, spreads."""
