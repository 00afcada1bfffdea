"""Compare reports: what differs between two runs, and which causes add up to it."""
