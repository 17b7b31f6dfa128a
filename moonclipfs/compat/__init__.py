"""Thin doors for programs written for others."""
