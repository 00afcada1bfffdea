"""What was sampled while an engine served: requests, stages, growth."""
