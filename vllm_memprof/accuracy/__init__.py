"""Published runs on hardware: rows of their table, and the spread of errors that a plan prints."""
