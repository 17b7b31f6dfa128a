# cython: language_level=3, freethreading_compatible=False
"""The flags of a mount's greeting that libfuse does not ask for. To be imported with RTLD_GLOBAL, before pyfuse3."""

from libc.stdint cimport uint64_t


cdef extern from "sys/uio.h" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

cdef extern from "fuse_init.h" nogil:
    void fuse_init_arm(uint64_t wanted)
    int fuse_init_active()
    uint64_t fuse_init_granted()
    void fuse_init_request(const char *request, size_t length)
    void fuse_init_reply(const iovec *parts, int count)
    ssize_t fuse_init_write(int fd, iovec *parts, int count, void *data)
    int FUSE_INIT_REFUSAL_BYTES
    int fuse_init_refuses(const char *request, size_t length, char *reply)


def arm(uint64_t wanted):
    """Ask for the INIT flags `wanted` at the next mount, as far as the kernel offers them."""
    fuse_init_arm(wanted)


def active():
    """True when the messages of the mounted session pass through here."""
    return bool(fuse_init_active())


def granted():
    """The INIT flags that the kernel was told; 0 before the mount was greeted."""
    return fuse_init_granted()


def feed_request(const unsigned char[::1] request):
    """For tests: take note of a request."""
    fuse_init_request(<const char *>&request[0] if request.shape[0] else NULL, request.shape[0])


def feed_reply(unsigned char[::1] head, unsigned char[::1] body):
    """For tests: change a reply as it would be on its way to the kernel."""
    cdef iovec parts[2]
    parts[0].iov_base = &head[0] if head.shape[0] else NULL
    parts[0].iov_len = head.shape[0]
    parts[1].iov_base = &body[0] if body.shape[0] else NULL
    parts[1].iov_len = body.shape[0]
    fuse_init_reply(parts, 2)


def send(int fd, const unsigned char[::1] head, const unsigned char[::1] body):
    """For tests: send a reply; returns how many bytes were taken."""
    cdef iovec parts[2]
    parts[0].iov_base = <void *>&head[0] if head.shape[0] else NULL
    parts[0].iov_len = head.shape[0]
    parts[1].iov_base = <void *>&body[0] if body.shape[0] else NULL
    parts[1].iov_len = body.shape[0]
    return fuse_init_write(fd, parts, 2, NULL)


def refusal(const unsigned char[::1] request):
    """For tests: the answer to a request that is not passed on, None for one that is."""
    cdef char reply[16]
    if request.shape[0] and fuse_init_refuses(<const char *>&request[0], request.shape[0], reply):
        return reply[:FUSE_INIT_REFUSAL_BYTES]
    return None
