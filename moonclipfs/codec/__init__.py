"""Bytes to encoded objects and back, block by block."""
