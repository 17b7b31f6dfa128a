#ifndef FUSE_INIT_H
#define FUSE_INIT_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* Ask for the flags `wanted` of INIT, as far as the kernel offers them, in the next session that is mounted. */
void fuse_init_arm(uint64_t wanted);

/* 1 when the session's messages pass through here. */
int fuse_init_active(void);

/* The flags of the reply to INIT, 0 before it. */
uint64_t fuse_init_granted(void);

/* Take note of a request of any length and content; change a reply that is the one to INIT. For tests, too. */
void fuse_init_request(const char *request, size_t length);
void fuse_init_reply(const struct iovec *parts, int count);

/* Send a message, as writev() does; with the GIL released while the kernel copies a long one. `data` is not used. */
ssize_t fuse_init_write(int fd, struct iovec *parts, int count, void *data);

/* 1 when a request of any length and content asks for an extended attribute of a family that no mount has; then
   `reply` is the answer. */
enum { FUSE_INIT_REFUSAL_BYTES = 16 };
int fuse_init_refuses(const char *request, size_t length, char reply[FUSE_INIT_REFUSAL_BYTES]);

#endif
