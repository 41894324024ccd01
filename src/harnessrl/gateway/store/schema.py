"""The tables. A change of the schema is a new script at the end of `MIGRATIONS`, never an edit."""

__all__ = ["MIGRATIONS", "SUMMARIZE"]

_FIRST = """
CREATE TABLE rollouts (
  id INTEGER PRIMARY KEY AUTOINCREMENT,     -- order of creation
  rollout_id TEXT NOT NULL UNIQUE,
  input BLOB NOT NULL,                      -- JSON, as are config and metadata
  is_train INTEGER NOT NULL,
  config BLOB NOT NULL,
  metadata BLOB NOT NULL,
  state TEXT NOT NULL,
  rank INTEGER NOT NULL,                    -- minus the priority while queuing, else 0
  version INTEGER NOT NULL DEFAULT 1,
  created_at REAL NOT NULL,
  updated_at REAL NOT NULL,
  k8s_job_name TEXT,
  last_attempt_id TEXT,
  error_message TEXT,
  failure_kind TEXT,
  held_seconds REAL,
  tries INTEGER NOT NULL DEFAULT 0,         -- attempts claimed by a controller
  controller TEXT,
  lease_until REAL,
  ended INTEGER,                            -- order of completion, from 1: the cursor of /terminal
  consumed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX rollouts_by_state ON rollouts (state, rank, id);
CREATE UNIQUE INDEX rollouts_by_end ON rollouts (ended) WHERE ended IS NOT NULL;
CREATE INDEX rollouts_by_lease ON rollouts (lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX rollouts_consumed ON rollouts (id) WHERE consumed;

CREATE TABLE changes (                      -- each state that a rollout took, or `deleted`
  cursor INTEGER PRIMARY KEY AUTOINCREMENT,
  rollout_id TEXT NOT NULL,
  state TEXT NOT NULL,
  at REAL NOT NULL
);

CREATE TABLE entries (                      -- events and calls in the order of their arrival
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  rollout INTEGER NOT NULL,
  attempt_id TEXT NOT NULL,
  event_type TEXT NOT NULL,
  timestamp REAL NOT NULL,
  data BLOB                                 -- JSON; NULL where the entry is a call
);
CREATE INDEX entries_by_attempt ON entries (rollout, attempt_id);

CREATE TABLE calls (                        -- what is looked up or changes
  entry INTEGER PRIMARY KEY,
  call_id TEXT NOT NULL UNIQUE,
  parent INTEGER,                           -- entry of the call that this one continues
  shared_ids INTEGER NOT NULL,              -- of the parent's prompt + sampled ids
  shared_messages INTEGER NOT NULL,         -- of the parent's
  http_status INTEGER NOT NULL,
  delivered INTEGER NOT NULL
);

CREATE TABLE payloads (                     -- the rest of a call, which is large and never changes
  entry INTEGER PRIMARY KEY,
  prompt_ids BLOB NOT NULL,                 -- int32, what follows the shared ones
  sampled_ids BLOB NOT NULL,                -- int32
  logprobs BLOB,                            -- float32
  messages BLOB NOT NULL,                   -- JSON list, what follows the shared ones
  request BLOB NOT NULL,                    -- JSON, the rest of the request; see `calls.py`
  response BLOB NOT NULL,                   -- JSON
  facts BLOB NOT NULL                       -- JSON, everything else
);

CREATE TABLE fields (                       -- large fields of requests, such as tools, once per rollout
  rollout INTEGER NOT NULL,
  digest TEXT NOT NULL,
  value BLOB NOT NULL,
  PRIMARY KEY (rollout, digest)
);

CREATE TABLE arrays (                       -- further per-token arrays of a call
  entry INTEGER NOT NULL,
  name TEXT NOT NULL,
  dtype TEXT NOT NULL,
  shape BLOB NOT NULL,
  value BLOB NOT NULL,
  PRIMARY KEY (entry, name)
);

CREATE TABLE endpoints (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  model TEXT NOT NULL,
  endpoint TEXT NOT NULL,
  value BLOB NOT NULL,                      -- JSON
  UNIQUE (model, endpoint)
);

CREATE TABLE settings (name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""

SUMMARIZE = """
INSERT OR REPLACE INTO summaries
WITH ended AS (SELECT id AS rollout, coalesce(last_attempt_id, '0') AS attempt_id FROM rollouts WHERE {which}),
seen AS (SELECT e.* FROM ended JOIN entries e USING (rollout, attempt_id)),
last_rewards AS (                           -- of the rollout as a whole (no call), and of each call
  SELECT rollout, value, call FROM (
    SELECT rollout, value, call, row_number() OVER (PARTITION BY rollout, call ORDER BY id DESC) AS nth FROM (
      SELECT rollout, id, json_extract(data, '$.value') AS value,
        coalesce(json_extract(data, '$.call_id'), json_extract(data, '$.turn')) AS call
      FROM seen WHERE event_type = 'reward'
    )
  ) WHERE nth = 1
),
outcomes AS (
  SELECT rollout, coalesce(max(CASE WHEN call IS NULL THEN value END), sum(value)) AS reward
  FROM last_rewards GROUP BY rollout
),
facts AS (
  SELECT rollout, length(sampled_ids) / 4 AS sampled, json_extract(facts, '$.agent') AS agent,
    json_extract(facts, '$.dialect') AS dialect,
    json_extract(facts, '$.versions[0][0]') AS low, json_extract(facts, '$.versions[#-1][0]') AS high
  FROM seen JOIN payloads ON entry = seen.id
)
SELECT rollout, max(reward), count(sampled), coalesce(sum(sampled), 0),
  json_group_array(DISTINCT agent) FILTER (WHERE agent IS NOT NULL),
  json_group_array(DISTINCT dialect) FILTER (WHERE dialect IS NOT NULL), min(low), max(high)
FROM ended LEFT JOIN outcomes USING (rollout) LEFT JOIN facts USING (rollout) GROUP BY rollout
"""
"""What lists of rollouts show, of the rollouts that `which` (a condition on `rollouts`) names."""

_LOOKED_AT = f"""
ALTER TABLE rollouts ADD COLUMN group_id TEXT
  GENERATED ALWAYS AS (json_extract(metadata, '$.group_id')) VIRTUAL;
CREATE INDEX rollouts_by_group ON rollouts (group_id);
CREATE INDEX rollouts_listed ON rollouts
  (is_train, state, failure_kind, error_message, group_id, created_at, updated_at);

CREATE TABLE summaries (                    -- of ended rollouts, of their last attempt
  rollout INTEGER PRIMARY KEY,
  reward REAL,
  calls INTEGER NOT NULL,
  sampled INTEGER NOT NULL,                 -- tokens
  agents TEXT,                              -- names, a JSON list, as are dialects
  dialects TEXT,
  version_min INTEGER,                      -- of the policy, over sampled tokens
  version_max INTEGER
);
{SUMMARIZE.format(which="ended IS NOT NULL")};

CREATE TABLE run_records (                  -- what trainers report of their runs
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  run_id TEXT NOT NULL,
  kind TEXT NOT NULL,
  at REAL NOT NULL,
  data BLOB NOT NULL                        -- JSON
);
CREATE INDEX run_records_by_run ON run_records (run_id, kind, id);
"""

_UNDER_WAY = """
CREATE TABLE under_way (                    -- calls that had begun and not ended, a moment ago
  call_id TEXT PRIMARY KEY,
  rollout_id TEXT NOT NULL,
  attempt_id TEXT NOT NULL,
  mode TEXT NOT NULL,
  dialect TEXT NOT NULL,
  started_at REAL NOT NULL
);
"""

_LISTS = f"{SUMMARIZE.format(which='ended IS NOT NULL')};"
"""Names were joined by commas before."""

MIGRATIONS: tuple[str, ...] = (_FIRST, _LOOKED_AT, _UNDER_WAY, _LISTS)
