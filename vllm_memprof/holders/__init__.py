"""Who holds a device's memory, asked from outside any engine."""
