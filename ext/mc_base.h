/* Words that every kernel shares: types, unaligned access, status codes, limits. */
#ifndef MC_BASE_H
#define MC_BASE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "moonclipfs needs a little-endian machine"
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

/* Elements come from the middle of files, so no pointer to them is aligned. */
typedef u8 u8u;
typedef u16 u16u __attribute__((aligned(1), may_alias));
typedef u32 u32u __attribute__((aligned(1), may_alias));
typedef u64 u64u __attribute__((aligned(1), may_alias));

static inline u16 mc_get16(const u8 *p) { return *(const u16u *)p; }
static inline u32 mc_get32(const u8 *p) { return *(const u32u *)p; }
static inline u64 mc_get64(const u8 *p) { return *(const u64u *)p; }
static inline void mc_put16(u8 *p, u16 v) { *(u16u *)p = v; }
static inline void mc_put32(u8 *p, u32 v) { *(u32u *)p = v; }
static inline void mc_put64(u8 *p, u64 v) { *(u64u *)p = v; }

#if defined(__x86_64__)
#define MC_X86 1
#endif

/* The limits of limits.py that the kernels need; a test compares them. */
#define MC_BLOCK_ELEMENTS ((size_t)1 << 16)
#define MC_BLOCK_BYTES ((size_t)1 << 18)
#define MC_MAX_RAW ((u64)1 << 30)
#define MC_MAX_WIDTH 8
#define MC_PREFIX_BYTES 32
#define MC_ENTRY_BYTES 12
#define MC_SHARED_BYTES ((u64)1 << 18) /* shared tables of one object, at most */

/* What a function that can fail returns. mc_message() has the words. */
enum {
    MC_OK = 0,
    MC_E_MEMORY,
    MC_E_USAGE,
    MC_E_SHORT_HEAD,
    MC_E_MAGIC,
    MC_E_DTYPE,
    MC_E_TRANSFORM,
    MC_E_RAW_LENGTH,
    MC_E_HEAD_LENGTH,
    MC_E_HEAD_CHECK,
    MC_E_TABLE,
    MC_E_EXPONENT,
    MC_E_BLOCK_LENGTHS,
    MC_E_RANGE,
    MC_E_BLOCK_SHORT,
    MC_E_BLOCK_LONG,
    MC_E_METHOD,
    MC_E_ZSTD,
    MC_E_STREAM,
    MC_E_BLOCK_CHECK,
    MC_E_VERIFY,
    MC_E_COUNT
};

const char *mc_message(int status);
u64 mc_xxh3(const void *data, size_t length);

#endif
