"""What Redis does in one step. Every script's keys have one hash tag, so that a Redis Cluster can run them.

The lease's keys: who holds it ("TOKEN REPLICA"), the highest token granted, and a hash that tells which server
with which data this is (`run`) and until when it grants nothing new (`quiet`, in ms of its clock).
"""

from __future__ import annotations

from typing import Final

_NOW: Final = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""

# KEYS lease, token, server; ARGV replica, token held or 0, highest token known, lease in ms.
# Tokens are at least the time in ms, so that they grow even where the counter was lost.
TAKE_LEASE: Final = (
    _NOW
    + """
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local known = redis.call('HMGET', KEYS[3], 'run', 'quiet')
local quiet = tonumber(known[2] or 0)
if known[1] ~= run then
  quiet = now + tonumber(ARGV[4])
  redis.call('HSET', KEYS[3], 'run', run, 'quiet', quiet)
end
local lease = redis.call('GET', KEYS[1])
local holder, held = '', 0
if lease then
  held, holder = string.match(lease, '^(%d+) (.*)$')
  held = tonumber(held)
end
local highest = tonumber(redis.call('GET', KEYS[2]) or 0)
local claim = tonumber(ARGV[2])
local granted = 0
if claim > 0 then
  if (held == claim and holder == ARGV[1]) or (now < quiet and claim > held and claim >= highest) then
    granted = claim
  end
elseif not lease and now >= quiet then
  granted = math.max(highest + 1, tonumber(ARGV[3]) + 1, now)
end
if granted > 0 then
  redis.call('SET', KEYS[1], string.format('%d %s', granted, ARGV[1]), 'PX', ARGV[4])
  if granted > highest then
    highest = granted
    redis.call('SET', KEYS[2], string.format('%d', granted))
  end
  holder = ARGV[1]
end
return {string.format('%d', granted), holder, string.format('%d', highest)}
"""
)

# KEYS lease, token, log; ARGV "TOKEN REPLICA", entry, entries kept. 1 when written, 0 when another leads.
RECORD_ACTION: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('LPUSH', KEYS[3], ARGV[2])
redis.call('LTRIM', KEYS[3], 0, ARGV[3] - 1)
return 1
"""

# KEYS presence, records, loads, instances' stamp; ARGV replica, lease in ms, load, record or "" for no change.
# Tells the loads of all, the stamp, and with a record of one's own the records of all.
EXCHANGE: Final = (
    _NOW
    + """
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[3])
local records = {}
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[4])
  for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
    redis.call('ZREM', KEYS[1], gone)
    redis.call('HDEL', KEYS[2], gone)
    redis.call('HDEL', KEYS[3], gone)
  end
  records = redis.call('HGETALL', KEYS[2])
end
return {redis.call('HGETALL', KEYS[3]), redis.call('GET', KEYS[4]) or '', records}
"""
)

# KEYS instances, their stamp; ARGV stamp, then id, order, entry of each. An entry replaces one of lower order.
PUBLISH_INSTANCES: Final = """
for i = 2, #ARGV, 3 do
  local known = redis.call('HGET', KEYS[1], ARGV[i])
  local order = known and string.match(known, '^[^\\n]*') or ''
  if ARGV[i + 1] > order then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1] .. '\\n' .. ARGV[i + 2])
  end
end
redis.call('SET', KEYS[2], ARGV[1])
return 1
"""

# KEYS instances, their stamp; tells the stamp and all entries.
READ_INSTANCES: Final = "return {redis.call('GET', KEYS[2]) or '', redis.call('HGETALL', KEYS[1])}"

# KEYS instances; ARGV ids.
FORGET_INSTANCES: Final = """
for i = 1, #ARGV do redis.call('HDEL', KEYS[1], ARGV[i]) end
return 1
"""

# KEYS learned; ARGV class and entry of each to write. Tells what of all classes is known.
EXCHANGE_LEARNED: Final = """
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return redis.call('HGETALL', KEYS[1])
"""

# KEYS lengths; ARGV what was learned.
WRITE_LENGTHS: Final = "redis.call('SET', KEYS[1], ARGV[1]) return 1"

# KEYS presence, records, learned, lengths; what a replica that joins wants to know.
LOOK: Final = (
    _NOW
    + """
local present = redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf')
local records = {}
for _, replica in ipairs(present) do
  local record = redis.call('HGET', KEYS[2], replica)
  if record then
    records[#records + 1] = replica
    records[#records + 1] = record
  end
end
return {records, redis.call('HGETALL', KEYS[3]), redis.call('GET', KEYS[4]) or ''}
"""
)

# KEYS presence, records, loads, lease; ARGV replica, "TOKEN REPLICA" or "".
LEAVE: Final = """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
if redis.call('GET', KEYS[4]) == ARGV[2] then redis.call('DEL', KEYS[4]) end
return 1
"""
