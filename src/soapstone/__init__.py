"""Soapstone: decide how to split a deep-learning model over many devices, and train it that way."""

__version__ = "0.1.0"
