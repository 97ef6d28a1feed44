"""Triptych: raw novels to pretrained, fine-tuned and fairly compared transformers of three families."""

__version__ = "0.1.0"
