"""Requests of the kernel, handles, errno and the life of a mount."""
