"""Every bound of the project, named. Sizes are in bytes, times in seconds, unless the name says otherwise."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Cuts (part of the store format: recorded in each store's config)
OBJECT_BYTES = 16 * MIB
"""No data object is longer."""
OBJECT_ELEMENTS = 4 * MIB
"""Tensors are cut on a grid of this many elements, so that pieces of the same tensor in two dtypes face each other."""
SLICE_BYTES = 1 * MIB
"""Stacked tensors (3 dimensions or more) are cut at each leading index when a slice is at least this long."""
SMALL_REGION_BYTES = 4 * KIB
"""Neighbouring regions shorter than this become one object."""
CHUNK_MIN = 64 * KIB
CHUNK_AVERAGE = 256 * KIB
CHUNK_MAX = 1 * MIB

# Recipes and directories
LITERAL_BYTES = 512
"""Pieces of at most this many bytes are kept inside the recipe: an object of their own would take as much beside it."""
LITERAL_FILE_BYTES = 4 * KIB
"""A file of at most this many bytes is kept inside its recipe."""
RECIPE_BYTES = 1 * GIB
DIRECTORY_BYTES = 1 * GIB
NAME_BYTES = 255
PATH_BYTES = 4096
PATH_DEPTH = 128
SYMLINKS = 40
"""Symbolic links followed for one path, as the kernel does."""
XATTR_BYTES = 64 * KIB
XATTRS = 1000
"""Extended attributes of one file of a writable layer."""
FILE_BYTES = 1 << 56

# Codec
BLOCK_ELEMENTS = 64 * KIB
"""Elements of a block: 256 KiB of fp32, 128 KiB of bf16. Fixed: blocks of a delta and its base face each other."""
BLOCK_BYTES = 256 * KIB
"""Length of a block of bytes that have no element type."""
RAW_BYTES = 1 * GIB
"""No object of any kind is longer."""
CHAIN_DEPTH = 3
"""Links between a delta and the full encoding at the end of its chain, at most."""
CHAIN_READ_DEPTH = 2 * CHAIN_DEPTH
"""Links that a reader follows: more than CHAIN_DEPTH, since a base may be stored again with a longer chain."""
BASE_STORES = 4
"""Base stores one behind the other: a private store over a private store, and so on."""

# Packs and log
PACK_BYTES = 256 * MIB
PACK_ENTRIES = 1 << 22
OPEN_PACKS = 64
"""Packs that one process keeps open for reading."""
LOG_RECORD_BYTES = 256 * MIB
LOG_CHECKPOINT_EVERY = 64
COMMIT_ATTEMPTS = 1000
RESERVE_BYTES = 16 * MIB
"""Preallocated, given back while forget and gc run on a full disk."""
RESERVE_LOAN_BYTES = 1 * MIB
"""How much of it a mount on a full disk may use, for its lease and its layer."""
REPACK_DEAD_SHARE = 0.30
REPACK_PRESSED_SHARE = 0.10
"""The same when the disk is needed."""
REBASE_SHARE = 0.90
"""What objects that hang on needless bases take when they are stored anew, as a share of what they and these bases
take, at most: less is not worth the work."""
REPACK_BYTES = 4 * GIB
"""Copied by gc at most before it deletes what the copies replace."""
GC_WAIT_SECONDS = 2.0
"""How long gc waits for other processes to see what it is about to delete; what they still use goes in a later run."""

# Parsers
HEADER_BYTES = 100 * MIB
TENSORS = 1 << 18
"""Tensors in one file; each takes about 1 KiB of memory to read. The largest models have fewer in all their files."""
DIMENSIONS = 32
ZIP_ENTRIES = 2 * TENSORS
JSON_VALUES = 16 * TENSORS
"""Commas, braces and brackets in a JSON header: it bounds the objects that reading it makes."""
TENSOR_NAME_BYTES = 1 * KIB
NPY_HEADER_BYTES = 64 * KIB
METADATA_PAIRS = 64 * KIB
"""Keys in the metadata of one file."""
METADATA_BYTES = 4 * KIB
"""Longer metadata strings (chat templates, licences) are described, not kept."""
EXPERTS = TENSORS
"""Experts in one directory: of more, none is offered as a file."""
EXPERT_PARTS = 1 * KIB
"""Tensors of one expert: one with more is left out."""
EXPERT_TEMPORARIES = 4 * KIB
"""Files that wait to be renamed over experts of one overlay."""
EXPERT_TEMPORARY_SECONDS = 3600.0
"""How long one of them is kept that nobody has open."""
PICKLE_BYTES = 256 * MIB
PICKLE_OPCODES = 1 << 24
PICKLE_OBJECTS = 1 << 22
"""Containers, strings, calls, marks and memo entries that reading one pickle may make."""
PICKLE_STRING_BYTES = 64 * KIB
"""Longer strings of a pickle are skipped: no name is that long."""
INDEX_BYTES = 64 * MIB
"""A JSON index of shards, or the metadata of a distributed checkpoint, that `verify --contents` reads."""
TENSOR_SPREAD_BYTES = 1 * GIB
"""Memory for one tensor whose elements overlap in the file, where that is more than its bytes there."""

# Work in flight
INGEST_BYTES = 512 * MIB
"""Memory that the pieces which one ingest works on at a time take at most."""
BLOCK_CACHE_BYTES = 256 * MIB
HEAD_CACHE_BYTES = 32 * MIB
"""Parsed heads of encoded objects."""
DIRECTORY_CACHE_ENTRIES = 1 << 17
RECIPE_CACHE_EXTENTS = 1 << 18
LAYOUT_CACHE_BYTES = 128 * MIB
EXPERT_CACHE_PARTS = 1 << 18
"""Tensors of experts, and names of their files, of directories whose experts are known; one takes about 500 bytes."""

# Mount
OPEN_HANDLES = 1 << 16
"""Files and directories open at one time."""
NODES = 1 << 20
"""Names that the kernel may know at one time; past a quarter of it, it is asked to forget the oldest."""
PREFETCH_BYTES = 16 * MIB
"""Read ahead of one sequential reader at most, and only where the block cache holds several times as much."""
PREFETCH_STEP_BYTES = 2 * MIB
"""Decoded ahead by one thread at a time."""
PREFETCH_QUEUE = 256
STREAMS = 8
"""Sequential readers of one file that are told apart."""
READ_THREADS = 16
"""Reads that wait for the store at one time; more wait their turn."""
METADATA_THREADS = 4
KERNEL_READ_AHEAD_KIB = 1024
"""The kernel's own read-ahead on a mount: its longest request."""
NAME_TIMEOUT_SECONDS = 0.5
"""How long the kernel may believe a name that a publish or a forget can change."""
EXPERT_TIMEOUT_SECONDS = 10.0
"""The same for an expert of an overlay: the kernel is told when the files that hold it change, but for odd ways."""
CONTENT_TIMEOUT_SECONDS = 3600.0
"""The same for what lies inside a snapshot; where that changes after all, the kernel is told."""
LISTING_BATCH = 128
"""Names of a directory looked up together."""
MOUNT_TASKS = 1024
"""Requests in work at one time; more wait in the kernel."""
FIRST_TIME_NS = -(1 << 31) * 10**9
LAST_TIME_NS = (1 << 63) // 10**9 * 10**9
"""The times that a file can have, in nanoseconds: from 1901 on, as on ext4, to 2262, the last that directories hold."""
WRITE_INLINE_BYTES = 128 * KIB
"""A write shorter than this is staged at once, a longer one on a thread where the disk is slow: else the change of
threads would take longer than the write, which ends in the page cache.
"""
SLOW_WRITE_SECONDS = 0.02
SLOW_DISK_SECONDS = 1.0
"""How long a disk is taken for slow after one write that was."""
WRITE_THREADS = 16
STAGING_PATIENCE_SECONDS = 30.0
"""A writer that waits for staged bytes to be stored is told of a full disk when, for so long, none could be."""
SYNC_THREADS = 32
"""Callers of fsync served at one time: they share a sync of the journal."""
CONTROL_LINE_BYTES = 64 * KIB
CONTROL_ANSWER_BYTES = 64 * MIB
CONTROL_CLIENTS = 16
"""Requests of one kind that may take long, in work at one time; more of that kind wait their turn."""
CONTROL_CONNECTIONS = 128
"""Clients of a control socket; past it, the one that was silent for the longest time is dropped."""
CONTROL_IDLE_SECONDS = 600.0
"""A client that asks nothing for so long is dropped."""
MOUNT_LOG_BYTES = 8 * MIB
"""The log file of a mount; one older one is kept beside it."""
HOLDERS_NAMED = 10
"""Processes that a busy unmount names."""

# Writable layers
INLINE_BYTES = 64 * KIB
"""Contents of at most this many bytes are staged in memory and in the journal; longer ones in a file."""
INLINE_TOTAL_BYTES = 256 * MIB
"""Contents staged in memory at one time; what comes past it is staged in files."""
STAGING_BYTES = 16 * GIB
"""Staged and not yet encoded, unless `--staging-limit` says otherwise."""
PATH_WRITE_BYTES = 4 * MIB
"""Written at a time through a path of a layer without a mount: what is longer waits for room in between."""
LONG_CLOSE_BYTES = 64 * MIB
"""A deleted staging file from so many bytes on is closed later, by a thread that may wait: the kernel needs long."""
STAGING_FILES = 256
"""Staging files that are open at one time."""
JOURNAL_SEGMENT_BYTES = 64 * MIB
"""A journal longer than this, and than twice what a fresh one would take, is written anew."""
JOURNAL_BYTES = 1 * GIB
"""A journal longer than this is written anew even if much is staged in it, which takes long."""
REWRITE_STAGED_BYTES = 16 * MIB
"""Staged in a journal that is written anew before that."""
JOURNAL_RESERVE_BYTES = 8 * MIB
"""Preallocated past the end of the journal, so that names can be changed and removed on a full disk."""
JOURNAL_STEP_BYTES = 4 * MIB
"""By how much more than needed a journal is preallocated at a time."""
RECORD_BYTES = 256 * MIB
"""No journal record is longer."""
ENCODE_DELAY_SECONDS = 2.0
"""A file whose last writer is gone is encoded after this, unless it was deleted, replaced or opened again."""
SYNC_SECONDS = 5.0
"""What was closed is made durable after this, fsync or not."""
OPEN_SYNC_SECONDS = 30.0
"""The same for what is open all the time, as a log is."""
SEAL_AFTER_SECONDS = 60.0
WATCH_QUIET_SECONDS = 10.0
"""The same for a plain directory that is watched."""
WATCH_LOOK_SECONDS = 2.0
"""How often a directory that is watched is looked at."""
RETRY_SECONDS = 30.0
"""How long what could not be sealed or absorbed is left alone while nothing changes."""
SEAL_WRITERS_SECONDS = 5.0
"""How long an explicit seal waits for files that are open for writing."""
WRITERS = 4096
"""Directories of a layer for which it is known which process wrote to them."""
CAPTURED_FILES = 1000
"""Staged files that a capture of a directory holds; more are encoded before it is taken."""
PUBLISHED_CAPTURES = 256
"""Captures of a layer of which it is known what version they became last."""
SIBLINGS = 8
"""Snapshots of a line that a new one is compared with."""
KEEP_VERSIONS = 3
"""Automatic versions of a name that are kept."""
KEEP_DELETED_SECONDS = 7 * 24 * 3600.0
"""How long what was removed stays in `@versions`, while the disk has room."""
LOW_SPACE_SHARE = 0.05
"""Of the disk that a store is on: when less is free, what was removed goes at once."""
LOW_SPACE_BYTES = 4 * GIB
"""The same on a large disk."""
RECLAIM_SHARE = 0.10
"""Of the packs: a mount runs gc by itself when it would free so much, ..."""
RECLAIM_BYTES = 64 * MIB
"""... and at least this."""
HINTS = 4096
"""Replaced files that are remembered until what replaced them is encoded, and lines looked at for one batch."""
HINT_DEPTH = 8
"""Directories above a new file whose siblings are looked at for its like."""
HINT_SIBLINGS = 64
"""Of these, at most so many."""
ENCODE_CORE_SHARE = 0.25
"""Of the cores, for encoding in the background."""

ENCODE_BATCH_BYTES = 256 * MIB
"""Bytes of files that are encoded into packs which become durable together."""
ENCODE_BATCH_SECONDS = 30.0
"""Age at which such a batch is made durable, however little it holds."""
ENCODE_IDLE_SECONDS = 5.0
"""The same when nothing was added to it for so long."""
ENCODE_CHUNK_FILES = 256
"""Files that are handed to the encoder process at a time."""
ENCODE_CHUNK_BYTES = 64 * MIB
"""Bytes of them, but for a single longer one."""
ENCODE_RETRY_SECONDS = 5.0
"""What could not be encoded is tried again after this, then after twice as long each time."""
ENCODE_RETRY_MOST_SECONDS = 300.0
ENCODE_CACHE_BYTES = 64 * MIB
"""Decoded blocks that the encoder process keeps."""
STAGING_PRESSURE_SHARE = 0.75
"""Of the staging limit: past it, encoding takes all cores, and files that are still open too."""
OVERLAY_ENCODERS = 2
"""Overlays of one process that are being encoded at once, each in a process of its own."""
OVERLAY_ENCODER_LINGER_SECONDS = 2.0
"""How long such a process stays when it has nothing to do."""
OVERLAY_STAGED_BYTES = 256 * MIB
"""An overlay encodes what it has staged when that is more, or when it is told to."""
OVERLAYS_OPEN = 256
"""Overlays that one process has open at a time: each takes two descriptors."""
WIRE_BYTES = 1 * GIB
"""No message between a mount and its encoder process is longer."""

# Leases
LEASE_REFRESH_SECONDS = 0.5
LEASE_SILENCE_SECONDS = 60.0

# Paged experts
EXPERT_THREADS = 64
"""Threads that read experts ahead, at most."""
EXPERT_QUEUE = 256
"""Experts that are waiting to be read ahead or being read; more are not taken."""

# Checkpoint manager
SHARD_BYTES = 5 * 10**9
"""A part of a snapshot with more bytes of tensors is split into several files."""

PLAIN_SNAPSHOTS = 2
"""Snapshots of a run that wait to be encoded, at most: while there are so many, the next is encoded at once."""
PLAIN_DISK_SHARE = 4
"""A save is encoded at once where the disk has less room than so many times its bytes."""
PLAIN_CLOSE_SECONDS = 30.0
"""How long the end of a program, or of a manager, waits for what is stored to be encoded."""

# Saves of several ranks
RANKS = 1 << 16
RANKS_WAIT_SECONDS = 1800.0
"""How long ranks wait for each other's parts of a snapshot: as long as `torch.distributed` does by default."""
RANKS_LIST_SECONDS = 10.0
"""How long a rank waits to hear what others store, so that it need not."""
RANKS_POLL_SECONDS = 0.2
RANKS_LOOK_SECONDS = 1.0
"""How often a rank that waits looks whether the others live."""
RANK_NOTE_BYTES = 1 * GIB
"""No note of a rank is longer."""

# Stores of other programs
FOREIGN_SNAPSHOTS = 1 << 20
"""Snapshots in an index that is read."""
FOREIGN_TENSOR_BYTES = 64 * GIB
"""A longer tensor is not read: it is held in memory as a whole."""
FOREIGN_CACHE_BYTES = 512 * MIB
"""Decoded tensors that are kept for those that are stored against them."""

# Reports
PROVENANCE_COMMAND_CHARACTERS = 8 * KIB
"""A longer command line is cut off in a snapshot's provenance."""
PROVENANCE_GIT_SECONDS = 2.0
COMPARE_WINDOW_BYTES = 1 * MIB
"""`diff` compares tensors in windows of at most this many bytes of each side."""
COMPARE_STRIDED_BYTES = 256 * MIB
"""A tensor whose elements lie in another order than those of its counterpart is held in memory: only up to this."""
