-- Asks Conductor where a request should go: POST {CONDUCTOR_URL}/pick{path}, with the request's own body.
--
-- Sets txn.server to the name of the server with the picked address. Without an answer, or where that address is
-- none of the backend's, nothing is set and HAProxy balances by itself. A refusal is the client's answer.

local CONDUCTOR = os.getenv("CONDUCTOR_URL") or "http://127.0.0.1:8000"
local BACKEND = os.getenv("CONDUCTOR_BACKEND") or "engines"
local TIMEOUT_MS = tonumber(os.getenv("CONDUCTOR_TIMEOUT_MS") or "2000")
local SET = "x%-conductor%-set%-(.+)"
-- Sent along: who asks, and what it wants beside its body.
local SENT = { "authorization", "x-api-key", "content-type", "x-request-id" }
local SENT_PREFIXES = { "x-conductor-", "x-llm-d-" }

local names = {} -- of servers, by "ip:port"

local function server_at(address)
    local name = names[address]
    local server = name and core.backends[BACKEND].servers[name]
    if server and server:get_addr() == address then
        return name
    end
    names = {}
    for each, listed in pairs(core.backends[BACKEND].servers) do
        names[listed:get_addr()] = each
    end
    return names[address]
end

local function is_sent(name)
    for _, each in ipairs(SENT) do
        if name == each then return true end
    end
    for _, prefix in ipairs(SENT_PREFIXES) do
        if name:sub(1, #prefix) == prefix then return true end
    end
    return false
end

local function first(values)
    if values == nil then return nil end
    return values[0] or values[1]
end

local function refuse(txn, answer)
    local reply = txn:reply({ status = answer.status, body = answer.body })
    for _, name in ipairs({ "content-type", "retry-after", "x-request-id" }) do
        local value = first(answer.headers[name])
        if value then reply:add_header(name, value) end
    end
    txn:done(reply)
end

core.register_action("pick", { "http-req" }, function(txn)
    local body = txn.sf:req_body()
    if #body == 0 or #body < tonumber(txn.sf:req_body_size()) then
        return -- longer than tune.bufsize
    end
    local headers = {}
    for name, values in pairs(txn.http:req_get_headers()) do
        if is_sent(name) then headers[name] = { first(values) } end
    end
    local answer = core.httpclient():post({
        url = CONDUCTOR .. "/pick" .. txn.sf:path(),
        headers = headers,
        body = body,
        timeout = TIMEOUT_MS,
    })
    if answer.status == 200 then
        local host = first(answer.headers["x-conductor-host"])
        local port = first(answer.headers["x-conductor-port"])
        local name = host and server_at(host .. ":" .. port)
        if name == nil then return end
        txn:set_var("txn.server", name)
        txn.http:req_del_header("x-prefiller-host-port")
        txn.http:req_del_header("x-data-parallel-rank")
        for header, values in pairs(answer.headers) do
            local set = header:match(SET)
            if set then txn.http:req_set_header(set, first(values)) end
        end
    elseif first(answer.headers["x-request-id"]) and (answer.status // 100 == 4 or answer.status == 503) then
        refuse(txn, answer) -- what is not known there, and what fails there, has no x-request-id or another status
    end
end, 0)
