"""The metrics of this process, for Prometheus.

Each metric is updated where its event happens.  Gauges that mirror a state are set by `penstock.api.metrics.sampler`.
They are in the registry of `prometheus_client`, as those of vLLM and of an operator's stages are.  If the variable
``PROMETHEUS_MULTIPROC_DIR`` names a folder, they are kept there, and a scrape sums those of all processes that use it.

No label holds a text that a client chooses: each would be a time series of its own, forever.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_RESPONSE_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
_FIRST_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The buckets that OpenTelemetry's GenAI conventions give for the time to the first token."""

# HTTP

HTTP_REQUESTS = Counter(
    "penstock_http_requests",
    "Requests by API, method, route and status; 499 if the client left before its end",
    ["api", "method", "route", "status"],
)
HTTP_SECONDS = Histogram(
    "penstock_http_request_duration_seconds",
    "Time from a request to the end of its answer",
    ["api", "method", "route"],
    buckets=_REQUEST_SECONDS,
)
REFUSED = Counter("penstock_refused", "Requests that were refused, by the code of the error", ["code"])
AUDIT_LOST = Counter("penstock_audit_lost", "Lines of the audit log that could not be written")
PARAMETERS = Counter("penstock_parameters", "Requests that give a parameter of the API", ["parameter"])
HELD_BYTES = Gauge("penstock_held_body_bytes", "Bytes of request bodies in memory", multiprocess_mode="livesum")

# Responses

RESPONSES = Counter(
    "penstock_responses",
    "Responses that have ended; reason is that of an incomplete one, or the error code of a failed one",
    ["model", "status", "reason", "mode"],
)
RESPONSES_RUNNING = Gauge(
    "penstock_responses_running",
    "Responses that run, by mode: sync, stream, background or websocket",
    ["model", "mode"],
    multiprocess_mode="livesum",
)
RESPONSES_QUEUED = Gauge(
    "penstock_responses_queued", "Background responses that wait to run", multiprocess_mode="livesum"
)
RESPONSES_UNSERVED = Gauge(
    "penstock_responses_unserved",
    "Background responses in the store that wait for a server of their model, as this one does not serve it",
    multiprocess_mode="livemax",
)
OLDEST_QUEUED_SECONDS = Gauge(
    "penstock_oldest_queued_seconds",
    "Age of the background response that has waited longest; 0 if none waits",
    multiprocess_mode="livemax",
)
RESPONSE_SECONDS = Histogram(
    "penstock_response_duration_seconds",
    "Time from the start of a response, or its place in the queue, to its end",
    ["model", "mode"],
    buckets=_RESPONSE_SECONDS,
)
FIRST_EVENT_SECONDS = Histogram(
    "penstock_time_to_first_event_seconds",
    "Time from a request to the first event that its client is sent",
    ["api", "model"],
    buckets=_FIRST_SECONDS,
)
FIRST_TOKEN_SECONDS = Histogram(
    "penstock_time_to_first_token_seconds",
    "Time from a request to the first delta that its client is sent",
    ["api", "model"],
    buckets=_FIRST_SECONDS,
)
TOKENS = Counter(
    "penstock_tokens",
    "Tokens of responses; cached_input is a part of input, reasoning is a part of output, tool_output of input",
    ["model", "type"],
)
KEY_RESPONSES = Counter(
    "penstock_key_responses",
    "Responses that have ended, by the name of their API key; with --metrics-by-key",
    ["key", "status"],
)
KEY_TOKENS = Counter(
    "penstock_key_tokens",
    "Tokens of responses, by the name of their API key; with --metrics-by-key",
    ["key", "type"],
)
TURNS = Histogram(
    "penstock_turns_per_response", "Turns of the model in a response", buckets=(1, 2, 3, 5, 8, 13, 21, 34, 55, 100)
)
COMPACTIONS = Counter("penstock_compactions", "Compactions of conversations that were made")

BATCH_LINES = Counter(
    "penstock_batch_lines",
    "Lines of batches that have got a result here: succeeded or errored, or cut off as cancelled or expired",
    ["result"],
)
BATCH_TOKENS = Counter("penstock_batch_tokens", "Tokens of the lines of batches, input or output", ["type"])
BATCH_LINES_RUNNING = Gauge(
    "penstock_batch_lines_running", "Lines of batches that run here", multiprocess_mode="livesum"
)
BATCH_LINES_WAITING = Gauge(
    "penstock_batch_lines_waiting", "Lines of batches in the store that wait", multiprocess_mode="livemax"
)
BATCH_IDLE_SHARE = Gauge(
    "penstock_batch_idle_share",
    "Share of the places of engines that no other response has, and that lines of batches use",
    multiprocess_mode="livemax",
)

PASSED_SECONDS = Histogram(
    "penstock_passed_duration_seconds",
    "Time of requests that another server answers unread, from their bodies to the ends of their answers",
    ["model", "status"],
    buckets=_REQUEST_SECONDS,
)

MODEL_STATE = Gauge(
    "penstock_model_state",
    "1 for the present state of each of several models, and 0 for the others",
    ["model", "state"],
    multiprocess_mode="livemax",
)
MODEL_WAITING = Gauge(
    "penstock_model_waiting",
    "Requests that wait until one of several models is up",
    ["model"],
    multiprocess_mode="livesum",
)
MODEL_CHANGE_SECONDS = Histogram(
    "penstock_model_change_seconds",
    "Time that one of several models took to start or to stop, by the state in which it ended: ready after a start or a"
    " wake, asleep, stopped, or failed",
    ["model", "change", "state"],
    buckets=_RESPONSE_SECONDS,
)

# Streams

STREAMS_OPEN = Gauge(
    "penstock_streams_open",
    "Streams of events that are being sent, by mode: stream, resume or websocket",
    ["mode"],
    multiprocess_mode="livesum",
)
RESUMES = Counter("penstock_stream_resumes", "Streams of existing responses that clients have opened")
DISCONNECTS = Counter(
    "penstock_client_disconnects",
    "Clients that left before the end of their answer, by mode: sync, stream, resume or websocket",
    ["mode"],
)
WEBSOCKETS = Gauge("penstock_websocket_connections", "Open WebSocket connections", multiprocess_mode="livesum")

# Stages

STAGE_ERRORS = Counter("penstock_stage_errors", "Responses that an error of a stage has ended", ["stage"])
RENDER_SECONDS = Histogram("penstock_render_seconds", "Time to render a prompt", buckets=_SHORT_SECONDS)
REPAIRS = Counter("penstock_harmony_repairs", "Repairs of wrong markup that the model wrote, by kind", ["kind"])
RECORDINGS_CUT = Counter("penstock_recordings_cut", "Files of recordings that were cut because the disk was too slow")

TURNS_WAITING = Gauge(
    "penstock_turns_waiting",
    "Turns of the model that wait for a place in the engine",
    ["model"],
    multiprocess_mode="livesum",
)
TURN_WAIT_SECONDS = Histogram(
    "penstock_turn_wait_seconds",
    "Time that a turn of the model waited for a place in the engine",
    buckets=(0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
)

# Webhooks

WEBHOOKS = Counter(
    "penstock_webhooks",
    "Attempts to deliver a webhook; outcome is delivered, failed (another attempt follows) or given_up",
    ["outcome"],
)

# Tools

TOOL_CALLS = Counter(
    "penstock_tool_calls",
    "Calls of tools; tool is function, mcp:<label of the operator>, mcp, code_interpreter, shell or web_search",
    ["tool", "status"],
)
TOOL_SECONDS = Histogram(
    "penstock_tool_call_duration_seconds",
    "Time of a call that this server runs",
    ["tool"],
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
)
PROGRAMS = Counter(
    "penstock_programs",
    "Programs that ended, by outcome: completed, failed, timeout, diverged or cancelled; replayed if one ran again",
    ["outcome"],
)
PROGRAM_CALLS = Counter("penstock_program_calls", "Calls of tools, also counted above, that programs made", ["tool"])
PROGRAMS_SLEEPING = Gauge(
    "penstock_programs_sleeping", "Processes of programs that wait for their calls", multiprocess_mode="livesum"
)
SANDBOXES = Gauge("penstock_sandboxes_in_use", "Places for sandboxes in use", multiprocess_mode="livesum")
CONTAINERS = Gauge("penstock_containers", "Containers, those at work and idle ones", multiprocess_mode="livesum")
SANDBOXES_WAITING = Gauge(
    "penstock_sandboxes_waiting", "Calls that wait for a place for a sandbox", multiprocess_mode="livesum"
)
SANDBOXES_KILLED = Counter("penstock_sandboxes_killed", "Sandboxes that were ended before their response", ["reason"])

# Store

STORE_SECONDS = Histogram(
    "penstock_store_operation_seconds",
    "Time of one read, or of one group of changes",
    ["operation"],
    buckets=_SHORT_SECONDS,
)
STORE_ERRORS = Counter("penstock_store_errors", "Reads and groups of changes that failed", ["operation"])
STORE_BACKLOG = Gauge(
    "penstock_store_backlog_bytes", "Bytes of changes that wait to be written", multiprocess_mode="livesum"
)
STORED_RESPONSES = Gauge(
    "penstock_stored_responses", "Responses in the store at its last sweep", multiprocess_mode="livemax"
)
STORED_BYTES = Gauge("penstock_stored_bytes", "Bytes of the store at its last sweep", multiprocess_mode="livemax")

# Engine and process

ENGINE_UP = Gauge(
    "penstock_engine_up",
    "1 if an engine can generate; engine is host:port with --engine, the name of one of several models, or else local",
    ["engine"],
    multiprocess_mode="livemin",
)
ENGINE_RUNNING = Gauge(
    "penstock_engine_running",
    "Generations that run on an engine over HTTP",
    ["engine"],
    multiprocess_mode="livesum",
)
ENGINE_CACHED_BLOCKS = Gauge(
    "penstock_engine_cached_blocks",
    "Blocks that an engine's prefix cache is known to hold, with --kv-events",
    ["engine"],
    multiprocess_mode="livemax",
)
ENGINE_WEIGHTS = Gauge(
    "penstock_engine_weights",
    "1 for the version of its weights that an engine named last",
    ["engine", "version"],
    multiprocess_mode="livemax",
)
ENGINE_FAILOVERS = Counter(
    "penstock_engine_failovers", "Prompts that an engine lost or refused, and that were sent to another", ["engine"]
)
ENGINE_CHOICES = Counter(
    "penstock_engine_choices",
    "Turns by the choice among several engines: new conversation, affine (the engine of its earlier turns), or moved",
    ["engine", "choice"],
)
HINTS = Counter(
    "penstock_hints", "Hints for caches: keep, let_go or fetch; outcome is heard or unheard", ["action", "outcome"]
)
LOOP_LAG = Histogram(
    "penstock_event_loop_lag_seconds",
    "Delay of a timer of the event loop, four times a second",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
BUILD_INFO = Gauge(
    "penstock_build_info", "1, with the versions of this server", ["version", "vllm"], multiprocess_mode="livemax"
)
