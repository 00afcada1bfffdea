"""Who holds the device's memory, at each edge of a phase and from rank to rank."""
