"""What [MASK] does to a model: rank (MAE-LM), entropy and lattices (ExLM), and a report of all."""
