/*
 * What the kernel is asked for when a mount greets it, beyond what libfuse asks for.
 *
 * The fuse_session_mount() here stands before libfuse's own: the linker finds it first when this library is loaded
 * for all (RTLD_GLOBAL) before pyfuse3. It calls libfuse's, then reads and writes the messages of the session itself,
 * through fuse_session_custom_io() of libfuse 3.14. Messages pass unchanged, but for flags of the reply to INIT, and
 * for the kernel's question after a file's capabilities, which comes before the first write to every file: it is
 * answered here, as for all attributes of families that no mount has. While a long reply is copied, other threads of
 * Python go on.
 *
 * All of it runs on the one thread that serves the session.
 */
#include <Python.h> /* first, as it wants to be; it defines _GNU_SOURCE */

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fuse_init.h"

/* The layout of messages, fixed by the kernel (linux/fuse.h, which may be too old to have all of it). */
enum { IN_OPCODE = 4, IN_UNIQUE = 8, IN_BODY = 40 };
enum { OUT_BYTES = FUSE_INIT_REFUSAL_BYTES, OUT_ERROR = 4, OUT_UNIQUE = 8 };
enum { GETXATTR = 22, INIT = 26 };
enum { GETXATTR_IN_NAME = IN_BODY + 8 };
enum { INIT_IN_FLAGS = IN_BODY + 12, INIT_IN_FLAGS2 = IN_BODY + 16 };
enum { INIT_OUT_FLAGS = 12, INIT_OUT_FLAGS2 = 32, INIT_OUT_BYTES = 64 };
enum { LONG_REPLY_BYTES = 128 * 1024 };
#define INIT_EXT (1u << 30) /* flags2 counts */

struct fuse_session;

struct custom_io { /* fuse_custom_io, as far as every libfuse that has it knows it */
    ssize_t (*writev)(int fd, struct iovec *parts, int count, void *data);
    ssize_t (*read)(int fd, void *out, size_t length, void *data);
    void *splice_receive, *splice_send;
};

static struct {
    uint64_t wanted, offered, granted, unique; /* of the INIT request, until it is answered */
    int armed, active;
} state;

static uint32_t get32(const char *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t get64(const char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void put32(char *at, uint32_t value)
{
    memcpy(at, &value, sizeof value);
}

void fuse_init_request(const char *request, size_t length)
{
    if (length < INIT_IN_FLAGS2 || get32(request + IN_OPCODE) != INIT)
        return;
    state.offered = get32(request + INIT_IN_FLAGS);
    if ((state.offered & INIT_EXT) && length >= INIT_IN_FLAGS2 + 4)
        state.offered |= (uint64_t)get32(request + INIT_IN_FLAGS2) << 32;
    state.unique = get64(request + IN_UNIQUE);
}

void fuse_init_reply(const struct iovec *parts, int count)
{
    if (!state.unique || count < 2 || parts[0].iov_len < OUT_BYTES || parts[1].iov_len < INIT_OUT_FLAGS + 4)
        return;
    const char *head = parts[0].iov_base;
    if (get64(head + OUT_UNIQUE) != state.unique || get32(head + OUT_ERROR) != 0)
        return;
    char *body = parts[1].iov_base;
    uint64_t adds = state.wanted & state.offered;
    if (parts[1].iov_len < INIT_OUT_BYTES || !(state.offered & INIT_EXT))
        adds &= UINT32_MAX;
    uint32_t flags = get32(body + INIT_OUT_FLAGS) | (uint32_t)adds;
    state.granted = flags;
    if (adds >> 32) {
        const uint32_t before = flags & INIT_EXT ? get32(body + INIT_OUT_FLAGS2) : 0;
        flags |= INIT_EXT;
        put32(body + INIT_OUT_FLAGS2, before | (uint32_t)(adds >> 32));
    }
    if ((flags & INIT_EXT) && parts[1].iov_len >= INIT_OUT_BYTES)
        state.granted |= (uint64_t)get32(body + INIT_OUT_FLAGS2) << 32;
    put32(body + INIT_OUT_FLAGS, flags);
    state.unique = 0;
}

int fuse_init_refuses(const char *request, size_t length, char reply[FUSE_INIT_REFUSAL_BYTES])
{
    static const char *const families[] = {"security.", "system."};
    if (length <= GETXATTR_IN_NAME || get32(request + IN_OPCODE) != GETXATTR)
        return 0;
    for (size_t at = 0; at < sizeof families / sizeof *families; at++) {
        const size_t prefix = strlen(families[at]);
        if (length - GETXATTR_IN_NAME > prefix && !memcmp(request + GETXATTR_IN_NAME, families[at], prefix)) {
            put32(reply, OUT_BYTES);
            put32(reply + OUT_ERROR, (uint32_t)-EOPNOTSUPP);
            memcpy(reply + OUT_UNIQUE, request + IN_UNIQUE, 8);
            return 1;
        }
    }
    return 0;
}

static ssize_t read_request(int fd, void *out, size_t length, void *data)
{
    (void)data;
    char refusal[FUSE_INIT_REFUSAL_BYTES];
    const ssize_t count = read(fd, out, length);
    if (count < 0 && errno == EAGAIN)
        errno = EINTR; /* who asked was killed, and took it back: pyfuse3 waits for the next request */
    if (count <= 0)
        return count;
    if (fuse_init_refuses(out, (size_t)count, refusal)) {
        /* Only a request that was taken back meanwhile, or a mount that ended, gets no answer: neither waits. */
        if (write(fd, refusal, sizeof refusal) >= 0 || errno != ENODEV)
            errno = EINTR; /* whoever reads asks again when there is more */
        return -1;
    }
    fuse_init_request(out, (size_t)count);
    return count;
}

ssize_t fuse_init_write(int fd, struct iovec *parts, int count, void *data)
{
    (void)data;
    fuse_init_reply(parts, count);
    /* Who comes without the GIL, as a notification does, is in nobody's way. */
    if (count < 2 || parts[count - 1].iov_len < LONG_REPLY_BYTES || !PyGILState_Check())
        return writev(fd, parts, count);
    PyThreadState *thread = PyEval_SaveThread();
    const ssize_t written = writev(fd, parts, count);
    const int error = errno;
    PyEval_RestoreThread(thread);
    errno = error;
    return written;
}

/* Let a mounted session read and write through this file; without a libfuse that can, it goes on as it is. */
static void take_over(void *library, struct fuse_session *session)
{
    int (*session_fd)(struct fuse_session *);
    int (*custom_io)(struct fuse_session *, const struct custom_io *, int);
    int (*custom_io_sized)(struct fuse_session *, const struct custom_io *, size_t, int);
    static const struct custom_io io = {.writev = fuse_init_write, .read = read_request};

    *(void **)&session_fd = dlsym(library, "fuse_session_fd");
    *(void **)&custom_io = dlsym(library, "fuse_session_custom_io");
    *(void **)&custom_io_sized = dlsym(library, "fuse_session_custom_io_317"); /* since 3.17 */
    if (!session_fd)
        return;
    const int fd = session_fd(session);
    if (custom_io_sized)
        state.active = custom_io_sized(session, &io, sizeof io, fd) == 0;
    else if (custom_io)
        state.active = custom_io(session, &io, fd) == 0;
    if (state.active) { /* a read that waits would stop everything else on the thread */
        const int flags = fcntl(fd, F_GETFL);
        fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    }
}

__attribute__((visibility("default"))) int fuse_session_mount(struct fuse_session *session, const char *mountpoint)
{
    /* The caller's own libfuse, of whatever version: found where the caller's symbols are. */
    Dl_info caller;
    int (*mount)(struct fuse_session *, const char *) = NULL;
    void *library = NULL;
    if (dladdr(__builtin_return_address(0), &caller) && caller.dli_fname)
        library = dlopen(caller.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (library)
        *(void **)&mount = dlsym(library, "fuse_session_mount");
    if (!mount || mount == fuse_session_mount)
        return -1;
    const int status = mount(session, mountpoint);
    if (status == 0 && state.armed) {
        state.armed = 0;
        take_over(library, session);
    }
    return status;
}

void fuse_init_arm(uint64_t wanted)
{
    memset(&state, 0, sizeof state);
    state.wanted = wanted;
    state.armed = 1;
}

int fuse_init_active(void)
{
    return state.active;
}

uint64_t fuse_init_granted(void)
{
    return state.granted;
}
