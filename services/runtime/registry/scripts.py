"""The registry's writes, each one atomic on the server. Every key gets a time to live with every write.

Incarnations are 20-digit strings (see `codec.padded`). `emit` numbers an event and appends it; numbering begins anew, under a
new epoch, when the server lost its data.
"""

from __future__ import annotations

from typing import Final

_EMIT: Final = """
local function emit(events, sequence, ttl_ms, max_events, ...)
  if redis.call('HEXISTS', sequence, 'epoch') == 0 then
    local now = redis.call('TIME')
    redis.call('HSET', sequence, 'epoch', now[1] .. '.' .. now[2])
  end
  local n = redis.call('HINCRBY', sequence, 'n', 1)
  redis.call('XADD', events, 'MAXLEN', '~', max_events, '*', 'n', n, ...)
  redis.call('PEXPIRE', events, ttl_ms)
  redis.call('PEXPIRE', sequence, ttl_ms)
end
"""

REGISTER: Final = (
    _EMIT
    + """
-- KEYS worker index fence events sequence; ARGV id incarnation info ttl_ms keep_ms max_events
-- Returns {'stale', incarnation} or {'ok', fresh, replaced incarnation or ''}.
local newest = redis.call('GET', KEYS[3])
if newest and newest > ARGV[2] then return {'stale', newest} end
local fresh, replaced = 0, ''
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then
  fresh = 1
  local last = redis.call('HGET', KEYS[2], ARGV[1])
  if last and last ~= ARGV[2] then
    replaced = last
    emit(KEYS[4], KEYS[5], ARGV[5], ARGV[6], 'kind', 'gone', 'worker_id', ARGV[1], 'incarnation', last)
  end
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'info', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[5])
emit(KEYS[4], KEYS[5], ARGV[5], ARGV[6], 'kind', 'seen', 'info', ARGV[3])
return {'ok', fresh, replaced}
"""
)

DEREGISTER: Final = (
    _EMIT
    + """
-- KEYS worker events sequence; ARGV id incarnation keep_ms max_events. Returns whether this life was the registered one.
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
emit(KEYS[2], KEYS[3], ARGV[3], ARGV[4], 'kind', 'gone', 'worker_id', ARGV[1], 'incarnation', ARGV[2])
return 1
"""
)

PUBLISH_BLOCKS: Final = (
    _EMIT
    + """
-- KEYS worker held events sequence, then a key per block; ARGV id incarnation keep_ms max_events stored_count, then a raw hash per block,
-- those stored first. Returns 'ok', 'stale' or 'unknown'. Blocks that are there already are only renewed, without an event.
local present = redis.call('HGET', KEYS[1], 'incarnation')
if not present then return 'unknown' end
if present ~= ARGV[2] then return present > ARGV[2] and 'stale' or 'unknown' end
local stored, removed = {}, {}
local stored_count = tonumber(ARGV[5])
for i = 5, #KEYS do
  local hash = ARGV[i + 1]
  local is_ours = redis.call('HGET', KEYS[i], ARGV[1]) == ARGV[2]
  if i - 4 <= stored_count then
    if not is_ours or redis.call('SADD', KEYS[2], hash) == 1 then
      redis.call('HSET', KEYS[i], ARGV[1], ARGV[2])
      redis.call('SADD', KEYS[2], hash)
      stored[#stored + 1] = hash
    end
    redis.call('PEXPIRE', KEYS[i], ARGV[3])
  else
    if is_ours then redis.call('HDEL', KEYS[i], ARGV[1]) end
    if redis.call('SREM', KEYS[2], hash) == 1 then removed[#removed + 1] = hash end
  end
end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
if #stored + #removed > 0 then
  emit(KEYS[3], KEYS[4], ARGV[3], ARGV[4], 'kind', 'blocks', 'worker_id', ARGV[1], 'incarnation', ARGV[2],
       'stored', table.concat(stored), 'removed', table.concat(removed))
end
return 'ok'
"""
)

CLEAR: Final = """
-- KEYS worker index held; ARGV id incarnation block_prefix count. Takes some blocks of a life off the registry; returns how many are left.
-- With none left the index forgets the life, unless it is the one registered now.
for _, hash in ipairs(redis.call('SPOP', KEYS[3], ARGV[4])) do
  local key = ARGV[3] .. hash:gsub('.', function(c) return string.format('%02x', c:byte()) end)
  if redis.call('HGET', key, ARGV[1]) == ARGV[2] then redis.call('HDEL', key, ARGV[1]) end
end
local left = redis.call('SCARD', KEYS[3])
if left == 0 and redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[2] and redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HDEL', KEYS[2], ARGV[1])
end
return left
"""

DEAD: Final = """
-- KEYS index; ARGV prefix of worker keys. Returns id, incarnation, ... of indexed lives whose entry is gone.
local found = redis.call('HGETALL', KEYS[1])
local dead = {}
for i = 1, #found, 2 do
  if redis.call('EXISTS', ARGV[1] .. found[i]) == 0 then
    dead[#dead + 1] = found[i]
    dead[#dead + 1] = found[i + 1]
  end
end
return dead
"""

SNAPSHOT: Final = """
-- KEYS index events sequence; ARGV prefix of worker keys. Returns {epoch, n, last event's id, {info of each live worker}}.
local infos = {}
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  local info = redis.call('HGET', ARGV[1] .. id, 'info')
  if info then infos[#infos + 1] = info end
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
return {
  redis.call('HGET', KEYS[3], 'epoch') or '', redis.call('HGET', KEYS[3], 'n') or '0', last[1] and last[1][1] or '0-0', infos
}
"""

CHECK: Final = """
-- KEYS sequence, then worker keys. Returns {epoch, n, {positions (from 1) of the worker keys that are gone}}.
local gone = {}
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then gone[#gone + 1] = i - 1 end
end
return {redis.call('HGET', KEYS[1], 'epoch') or '', redis.call('HGET', KEYS[1], 'n') or '0', gone}
"""
