"""What a trained encoder can do."""
