"""The state of a simulated cluster as arrays: which column means what.

Numbers of engines, stores, links, work and flows are rows. Times are seconds of
virtual time, sizes tokens unless a name says blocks or bytes.
"""

from __future__ import annotations

from typing import Final

NONE: Final = -1

# ---- work: one leg of a request on one engine ----
WHOLE: Final = 0
PREFILL: Final = 1  # its KV cache is held until the decode leg has it
DECODE: Final = 2  # its KV cache comes from the prefill leg

# where a leg stands
UNBORN: Final = 0  # a decode leg whose prefill has not ended, or a free row
WAITING: Final = 1
LOADING: Final = 2  # has its room; what is cached elsewhere is on its way
LOADED: Final = 3
PREFILLING: Final = 4
COMPUTED: Final = 5  # the prompt is, but loads that stream beside the compute are not
DRAINING: Final = 6  # in the later stages of a pipeline
HELD: Final = 7  # a prefill leg that ended
WANTS_KV: Final = 8
RECEIVING: Final = 9
ARRIVED: Final = 10  # decodes from the next step on
DECODING: Final = 11

W_NUMBER: Final = 0  # of the request
W_LEG: Final = 1
W_ENGINE: Final = 2
W_STANDS: Final = 3
W_PROMPT: Final = 4
W_OUTPUT: Final = 5
W_HASHES: Final = 6  # where its block hashes begin
W_BLOCKS: Final = 7  # full blocks of its prompt
W_PARTNER: Final = 8  # the other leg
W_NEXT: Final = 9  # in a queue
W_TARGET: Final = 10  # tokens to have before it decodes: the prompt, and what was said before a preemption
W_DONE: Final = 11  # of these, reused or computed
W_CACHED: Final = 12  # reused, when it first began; of a decode leg: what it need not receive
W_COMMITTED: Final = 13  # blocks that it refers to
W_ROOM: Final = 14  # tokens taken, those in committed blocks included
W_SAID: Final = 15  # tokens of the answer, up to date only while it does not decode
W_END_STEP: Final = 16  # number of the engine's step after which the answer ends
W_LOG_START: Final = 17  # first run of the engine's log after its last first token
W_SEGMENT: Final = 18  # stretches of decoding before preemptions
W_ORDER: Final = 19  # of admission
W_PLAN: Final = 20  # blocks that it may load or fetch at most
W_PEER: Final = 21  # engine to fetch from
W_LOADS: Final = 22  # flows that it waits for
W_PREEMPTIONS: Final = 23
W_STREAMS: Final = 24  # its hand-off streams beside the prefill
W_FROM: Final = 25  # five columns: tokens by source
W_COLUMNS: Final = 30
HOST, DISK, POD, REMOTE, PEER = range(5)  # order of the sources

F_BEGAN_S: Final = 0
F_PREFILLED_S: Final = 1
F_RECEIVED_S: Final = 2
F_FIRST_S: Final = 3  # first token
F_READY: Final = 4  # tokens that can be handed on
F_COLUMNS: Final = 5

# ---- engines ----
E_RUN_STEPS: Final = 0  # 0: idle
E_CHUNKS: Final = 1  # in the run
E_PREFILLING: Final = 2
E_DECODING: Final = 3
E_SILENT: Final = 4  # decoding, no token yet, or none since it waited for the next step
E_RESERVED: Final = 5  # loading, loaded, computed, receiving, arrived: in the batch before long
E_WAITING: Final = 6  # head of a queue, tail, length; so are the next three
E_WANTS_KV: Final = 9
E_ARRIVED: Final = 12
E_LOADED: Final = 15
E_STEPS: Final = 18
E_CONTEXT: Final = 19  # tokens of all decodes in the next step
E_TOUCHED: Final = 20
E_RUNS: Final = 21
E_LOG_SIZE: Final = 22
E_LOG_FORGOTTEN: Final = 23
E_LOOSE: Final = 24  # tokens taken and in no committed block
E_REFERRED: Final = 25  # device blocks that somebody refers to
E_COMPUTED: Final = 26  # prompt tokens, in all
E_KV_TOKENS: Final = 27
E_SEQUENCES: Final = 28
E_CHUNK_TOKENS: Final = 29
E_STAGES: Final = 30  # of the pipeline
E_DEVICE: Final = 31  # numbers of stores
E_HOST: Final = 32
E_DISK: Final = 33
E_STREAMS: Final = 34
E_LOCATION: Final = 35  # four columns: node, rack, zone, site
E_SEALED: Final = 39  # somebody's gaps begin or end where the log ends: the next run stands apart
E_DISK_WRITE_BACK: Final = 40  # 1: what is stored on the device is not written through to the disk
E_COLUMNS: Final = 41

G_RUN_START_S: Final = 0
G_RUN_FIRST_S: Final = 1
G_RUN_GROWTH_S: Final = 2
G_BUSY_S: Final = 3
G_STAGE_FREE_S: Final = 4  # when the last stage of the pipeline ends what it has
G_A: Final = 5
G_B: Final = 6
G_BASE: Final = 7
G_D: Final = 8
G_DECODE_BASE: Final = 9
G_PER_SEQUENCE: Final = 10
G_PER_CONTEXT: Final = 11
G_KV_BYTES: Final = 12
G_LAYERS: Final = 13
G_NIC_LATENCY_S: Final = 14
G_LOAD_BYTES_PER_S: Final = 15  # four columns by source: host, disk, pod, remote
G_LOAD_LATENCY_S: Final = 19
G_STORED_BYTES: Final = 23  # of a token, as it lies there and travels
G_COLUMNS: Final = 27

# ---- stores of blocks: an engine's device, host, disk; pools ----
S_HEAD: Final = 0  # least recently used of those that nobody refers to
S_TAIL: Final = 1
S_IDLE: Final = 2
S_CAPACITY: Final = 3  # blocks
S_EVENTS: Final = 4  # head, tail: not yet told
S_PINNED: Final = 6  # blocks that stay until they are unpinned
S_WRITTEN: Final = 7  # blocks of a slower tier or a pool, in all
S_COLUMNS: Final = 8

# ---- residencies: blocks in stores ----
R_STORE: Final = 0
R_REFERENCES: Final = 1
R_PREVIOUS: Final = 2
R_NEXT: Final = 3
R_COLUMNS: Final = 4

# ---- events of stores ----
V_STORED: Final = 0  # 1, or 0 for a removal
V_START: Final = 1  # stored: positions in the hashes; removed: the block's hash as its bits
V_STOP: Final = 2
V_FIRST: Final = 3  # stored: where the chain begins, to name the block before
V_NEXT: Final = 4
V_COLUMNS: Final = 5

# ---- copies between stores that nobody waits for ----
P_NUMBER: Final = 0  # by which its end is told
P_SOURCE: Final = 1  # stores
P_TARGET: Final = 2
P_HASHES: Final = 3  # where the chain's hashes begin
P_START: Final = 4  # blocks of it
P_STOP: Final = 5
P_NEXT: Final = 6
P_COLUMNS: Final = 7

# ---- flows over links ----
L_WORK: Final = 0  # that waits for it; of a copy, -2 less its row
L_GIVER: Final = 1
L_TAKER: Final = 2
L_MORE: Final = 3  # more bytes will come: it does not end when it is through
L_SOURCE: Final = 4
L_CODER: Final = 5  # a link, too: bytes a second that are encoded or decoded on the way, as they travel
L_COLUMNS: Final = 6
M_LEFT_BYTES: Final = 0
M_SINCE_S: Final = 1
M_BYTES_PER_S: Final = 2
M_CAP_BYTES_PER_S: Final = 3
M_COLUMNS: Final = 4
HAND_OFF: Final = 9  # as source
COPY: Final = 10

# links by engine: out, in, host, disk, decoders and encoders by source; then one for each pool
DECODER: Final = 4
ENCODER: Final = 8
LINKS_PER_ENGINE: Final = 12
# of an engine in a pool
WRITES_THROUGH: Final = 1  # 0: no member
WRITES_BACK: Final = 2  # only what is handed down comes there

# ---- notices ----
PREFILLED: Final = 0
FIRST_TOKEN: Final = 1
FINISHED: Final = 2
COPIED: Final = 3  # N_CACHED: blocks of its range that the target has
N_KIND: Final = 0
N_AT_S: Final = 1
N_NUMBER: Final = 2
N_BEGAN_S: Final = 3
N_PREFILLED_S: Final = 4
N_RECEIVED_S: Final = 5
N_FIRST_S: Final = 6
N_ITL_S: Final = 7
N_TBT_S: Final = 8
N_CACHED: Final = 9
N_PREEMPTIONS: Final = 10
N_FROM: Final = 11
N_COLUMNS: Final = 16

# ---- numbers of the whole ----
C_FREE_WORK: Final = 0  # heads of the lists of free rows
C_FREE_RESIDENCY: Final = 1
C_FREE_EVENT: Final = 2
C_FREE_SEGMENT: Final = 3
C_FLOWS: Final = 4
C_NOTICES: Final = 5
C_ORDER: Final = 6
C_BLOCK_TOKENS: Final = 7
C_SINGLE_STEPS: Final = 8
C_TOUCHED: Final = 9
C_SHORT: Final = 10  # what there is too little room for
C_TIMERS: Final = 11  # prompts in the later stages of pipelines
C_EVENTS: Final = 12  # not yet told
C_SEGMENTS: Final = 13  # in use
C_RESUMES: Final = 14  # the shortage showed in the middle of what happens at one time
C_FREE_COPY: Final = 15
C_ASKS: Final = 16  # a notice wants an answer before time goes on
C_COLUMNS: Final = 17

# what to make larger before going on
ENOUGH: Final = 0
SHORT_OF_LOG: Final = 1
SHORT_OF_FLOWS: Final = 2
SHORT_OF_EVENTS: Final = 3
SHORT_OF_NOTICES: Final = 4
SHORT_OF_SEGMENTS: Final = 5
