"""What trains several models."""
