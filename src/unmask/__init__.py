"""unmask: masked pretraining that keeps the artificial [MASK] token from harming the encoder."""
