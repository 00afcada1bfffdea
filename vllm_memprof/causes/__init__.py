"""Names why an engine failed, from the lines of its log."""
