"""The bytes of a file to its layout and its cuts. No I/O, no store, no pickle is ever run."""
