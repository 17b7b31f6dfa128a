"""Objects, names and publishing over a small backend."""
