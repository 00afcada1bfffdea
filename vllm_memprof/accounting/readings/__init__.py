"""What one rank read: moments and quantities, each found once, and the audit of the engine's."""
