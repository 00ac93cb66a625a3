"""The work: one ``int64`` array that the wire kernels share, and the program in it.

Payloads lie in one buffer with PADDING bytes behind the last, so that words may be loaded across a
payload's end; what lies behind it is never interpreted. The program's arrays have room for as many blocks
and tokens as the buffer has bytes, which is more than any payload can hold.
"""

from __future__ import annotations

PADDING = 64
MAX_NESTING = 8
LOOKAHEAD = 24  # blocks whose links are fetched before they are needed
REMOVALS_AT_ONCE = 64  # blocks whose nodes are fetched before they are removed
MAX_BLOCK_SIZE = 1 << 24

(
    BUFFER,  # address of the payloads
    ENDS,  # int64 per payload: where it ends in the buffer
    PAYLOADS,
    NEXT_PAYLOAD,  # the first one that is not in the program
    PROGRAM,  # rows of operations
    OPERATIONS,
    FIRST_OPERATION,  # of the payload being read
    NAMES,  # uint64 per block: engine hash ^ stream domain
    HASHES,  # uint64 per block: local hash, later sequence hash
    BLOCKS,
    TOKENS,  # uint32: scratch for the tokens of one event
    MEDIA,  # rows of two words of name and the tier
    MEDIA_ROWS,
    NAMESPACES,  # rows of block size, adapter and domain
    NAMESPACE_ROWS,
    BLOCK_SIZE,  # that events must have, 0: any
    STREAM_DOMAIN,
    SEED,
    SECRETS,  # for SEED
    PLAIN_SECRETS,  # for seed 0
    KEYS,  # scratch for the canonical form of extra keys
    KEYS_BYTES,
    KEYS_USED,
    LANES,  # eight words of scratch
    EVENTS,  # counters, of payloads in the program
    UNKNOWN_EVENTS,
    REFUSED_EVENTS,
    SLOTS,  # int64 per tier: slot of the holder, -1: none
    OPERATION,  # the next one to run, and how many of its blocks are done
    DONE,
    BUDGET,  # blocks that the call may still apply
    APPLIED,
    UNRESOLVED,
    FETCHED,  # blocks whose links are on their way
    EVENT_HASHES,  # of the event being read
    EVENT_TOKENS,
    KINDS,  # rows of four words: length and name of each kind in cache_groups.PARTIAL_KINDS
    KIND_ROWS,
    MAIN_GROUP,  # cache_groups.MainGroup.number, or NO_GROUP
    PROVISIONAL,  # cache_groups.MainGroup.provisional
    OTHER_GROUP_EVENTS,  # counter, of payloads in the program
    PUBLISHED,  # extra_keys.ExtraKeyRecord.published
    DOUBTFUL,  # extra_keys.ExtraKeyRecord.doubtful
    NAMES_KEYS,  # whether the event being read names extra keys
) = range(44)
FIELDS = 44  # address of each field's value in the event being read, 0: not there
STACK = 56
WORK_WORDS = 64

TYPE, BLOCK_HASHES, PARENT, TOKEN_IDS, SIZE, LORA_ID, MEDIUM, LORA_NAME, EXTRA_KEYS = range(9)
GROUP, SPEC_KIND, CACHE_SALT = range(9, 12)
KNOWN_FIELDS = 12
NO_GROUP = -1
LAST_POSITION = SPEC_KIND  # arrays have the fields up to this one, in this order
REMOVED_FIELDS = (BLOCK_HASHES, MEDIUM, GROUP)  # of arrays

# a row of the program
KIND, TIER, START, COUNT, HAS_PARENT, PARENT_NAME, DOMAIN, BARE = range(8)
ROW_WORDS = 8
STORE, CHAINED, REMOVE, CLEAR, FORGET = range(5)  # CHAINED: a store whose hashes are sequence hashes by now
EVERY_TIER, DOUBTFUL_TIERS = -1, -2  # FORGET: as CLEAR, but not because the engine cleared anything
NOT_BARE, TAKEN_AS_PLAIN, LEFT_OUT = range(3)  # what bare stores come to where the hash is not known

# what run_program returns
FINISHED, BUDGET_SPENT, NO_ROOM, NO_SLOT, CLEARING, FORGETTING = range(6)
