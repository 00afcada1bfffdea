"""Small recorded runs. ``make_runs.py`` wrote the hand-made ones; see there for their figures."""
