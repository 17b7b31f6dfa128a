"""A file system without FUSE over the store."""
