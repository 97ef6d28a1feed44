"""Faults, bad input, untrusted files and load, on purpose: `make chaos`, or `python -m chaos --help`."""
