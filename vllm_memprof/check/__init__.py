"""Hold a report to limits: the budget file, its limits, the baseline, the ratchet."""
