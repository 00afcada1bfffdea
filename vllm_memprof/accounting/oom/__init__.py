"""An allocation that failed, and what would have let it pass."""
