"""Pretraining through a transformers Trainer."""
