"""Errors that a client may see, each with its HTTP status and the fields of OpenAI's error body.

Stages raise them.  Exceptions of libraries are mapped to one of them at the boundary.  Any other exception is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import ClassVar

_KINDS: dict[str, type[StageError]] = {}
"""The subclasses of `StageError` by name: recordings have the name of the error that ended a stream."""


class StageError(Exception):
    """A stage cannot continue.

    The client gets ``message`` and ``code``: in an error body before the response has begun, in the
    ``response.failed`` event after that.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = "server_error"

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code


class InvalidRequest(StageError):
    """The request has a value that this server cannot accept; ``param`` is its path.

    ``code`` is OpenAI's word for the kind of mistake, such as ``invalid_type``; None if OpenAI has none.

    Cure: change the value at ``param``; the message says what is expected.
    """

    status = 400
    type = "invalid_request_error"
    code: str | None = None


class UnsupportedParameter(InvalidRequest):
    """A parameter of the protocol that this server does not implement.

    Cure: leave the parameter out, or start the server with the option that the message names.
    """

    code = "unsupported_parameter"


class InvalidPrompt(InvalidRequest):
    """The engine refused the prompt or its sampling parameters.

    Cure: change what the message names: only the engine knows its vocabulary and what its grammars can hold.
    """

    code = "invalid_prompt"


class ImagesRefused(InvalidPrompt):
    """The engine refused images of the prompt, for ``reasons`` by their data URLs.

    Images of tools and of earlier turns are then left out, and the prompt is sent again; others end the request.

    Cure: send fewer, smaller or other images, as the message says.
    """

    reasons: Mapping[str, str] = {}

    def __init__(self, message: str, reasons: Mapping[str, str]) -> None:
        super().__init__(message, param="input")
        self.reasons = reasons


class ContextTooLong(InvalidRequest):
    """The prompt leaves no room for an answer.

    Clients compact the conversation, or take a model with a larger context, if they find words that they know in the
    message: it has those of vLLM, and those of Anthropic.

    Cure: send less; or leave out the oldest items with ``truncation``, or summarize them with
    ``context_management``; or serve the model with a larger ``--max-model-len``.
    """

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit: int, *, are_all: bool = True) -> None:
        self.prompt_tokens, self.limit = prompt_tokens, limit
        tokens = f"{prompt_tokens} tokens" if are_all else f"at least {prompt_tokens} tokens"
        message = (
            f"The prompt is too long: this model's maximum context length is {limit} tokens, the answer included, "
            f"and the input has {tokens}."
        )
        super().__init__(message, param="input")


class InvalidEncryptedContent(InvalidRequest):
    """A client has sent ``encrypted_content`` that this server did not seal for it, or cannot open.

    Cure: send items back as they came, with the API key that they came for, to a server with the same
    ``--seal-key-file`` or the same store.
    """

    code = "invalid_encrypted_content"

    def __init__(self, item: str) -> None:
        message = f"The encrypted content of {item} could not be verified: it was changed, or made elsewhere."
        super().__init__(message, param=f"{item}.encrypted_content")


class CompactionFailed(StageError):
    """The model wrote no summary, so that the conversation cannot be compacted.

    Cure: send the request again, or compact the conversation while it is shorter.
    """


class StoredFileNotFound(InvalidRequest):
    """A path or a ``file_id`` names no file of the client.

    Cure: use an id that an upload with the same API key returned.
    """

    status = 404

    def __init__(self, file_id: str, *, param: str | None = "file_id") -> None:
        super().__init__(f"No such File object: {file_id}", param=param)


class UploadNotFound(InvalidRequest):
    """The path names no upload of the client.

    Cure: begin an upload, and use its id with the same API key within the hour.
    """

    status = 404

    def __init__(self, upload_id: str) -> None:
        super().__init__(f"No such Upload object: {upload_id}", param="upload_id")


class BatchNotFound(InvalidRequest):
    """The path names no batch of the client, or one that was deleted.

    Cure: use an id from a list of batches, with the API key that made them.
    """

    status = 404

    def __init__(self, batch_id: str, *, param: str = "batch_id") -> None:
        super().__init__(f"No batch found with id '{batch_id}'.", param=param)


class BatchOver(InvalidRequest):
    """A batch that has ended, or is about to, cannot be cancelled.

    Cure: read its files of results, which it keeps.
    """

    status = 409

    def __init__(self, state: str) -> None:
        super().__init__(f"Cannot cancel a batch with status '{state}'.")


class ContainerNotFound(InvalidRequest):
    """A path or a tool names no container of the client that is alive.

    Cure: create a container, and use its id with the same API key before it expires.
    """

    status = 404

    def __init__(self, container_id: str, *, param: str = "container_id") -> None:
        message = f"There is no container {container_id!r}: it is unknown, was deleted, or has expired."
        super().__init__(message, param=param, code="container_not_found")


class ContainerFileNotFound(InvalidRequest):
    """The path names no file of the container.

    Cure: use an id from the list of the files of that container.
    """

    status = 404
    code = "container_file_not_found"

    def __init__(self, file_id: str) -> None:
        super().__init__(f"There is no file {file_id!r} in this container.", param="file_id")


class ContainerElsewhere(InvalidRequest):
    """Another server of the store has the container; the edge passes the request on to its ``url`` if it can.

    Cure: send the request again in a few seconds; the operator checks ``--peer-url`` of the servers.
    """

    status = 409
    code = "container_elsewhere"

    def __init__(self, container_id: str, url: str, *, param: str) -> None:
        message = f"Another server has the container {container_id!r}, to which this request cannot be passed on."
        super().__init__(message, param=param)
        self.url = url
        self.body = b""
        """The body of the request."""
        self.stays = False
        """True if that server does not serve the model."""


class VectorStoreNotFound(InvalidRequest):
    """A path or a parameter names no vector store of the client, or nothing in it.

    Cure: use an id from a list of vector stores, of their files or of their batches, with the API key that made
    them.
    """

    status = 404

    def __init__(self, store_id: str, *, kind: str = "Vector store", param: str | None = "vector_store_id") -> None:
        super().__init__(f"{kind} with id {store_id!r} not found.", param=param)


class VectorStoreExpired(InvalidRequest):
    """A vector store was not used for as long as it lasts: its files have left it.

    Cure: add the files to a new vector store, with a longer ``expires_after`` or none.
    """

    def __init__(self, store_id: str, *, param: str = "vector_store_id") -> None:
        super().__init__(f"Vector store {store_id!r} is expired.", param=param, code="vector_store_expired")


class RolloutNotFound(InvalidRequest):
    """A path names no session that has a recording in the folder of ``--record``.

    Cure: use the ``session`` of an entry of ``GET /v1/rollouts``; a recording counts when its response has ended.
    """

    status = 404

    def __init__(self, session: str, *, param: str | None = "session") -> None:
        super().__init__(f"Session {session!r} has no recordings.", param=param)


class NotRecorded(InvalidRequest):
    """The server answers from recordings and has none for this request.

    Cure: send one of the recorded inputs, which the log names at the start, or give the name of a recording as
    ``model``.
    """

    code = "not_recorded"

    def __init__(self, problem: str) -> None:
        super().__init__(problem, param="input")


STORES_NOTHING = " This server stores nothing (--store none). Its operator can name a file or a database by --store."


class PreviousResponseNotFound(InvalidRequest):
    """``previous_response_id`` names no stored response.

    Cure: use the id of a response that the same API key stored, within ``--store-ttl``; or send the conversation as
    ``input``.
    """

    code = "previous_response_not_found"

    def __init__(self, response_id: str, *, keeps: bool = True) -> None:
        message = f"Previous response with id {response_id!r} not found."
        super().__init__(message if keeps else message + STORES_NOTHING, param="previous_response_id")


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not serve.

    Cure: use a name that ``GET /v1/models`` lists, or give the model another one with ``--served-model-name`` or
    ``--model-alias``.
    """

    status = 404
    code = "model_not_found"


class PromptNotFound(InvalidRequest):
    """The request names no prompt of the operator, or no version of it.

    Cure: use the id and the version of a prompt that ``GET /v1/prompts`` lists.
    """

    status = 404
    code = "prompt_not_found"


class ResponseNotFound(InvalidRequest):
    """The path names no stored response.

    Cure: use the id of a response that the same API key stored, within ``--store-ttl``, and that was not deleted.
    """

    status = 404
    code = "response_not_found"

    def __init__(self, response_id: str, *, keeps: bool = True) -> None:
        message = f"There is no stored response {response_id!r}."
        super().__init__(message if keeps else message + STORES_NOTHING, param="response_id")


class StreamExpired(InvalidRequest):
    """The events of a stored response have expired; only the final response is kept.

    Cure: get the response without ``stream``, or keep streams longer with ``--stream-ttl``.
    """

    code = "stream_expired"


class ConversationNotFound(InvalidRequest):
    """The request names a conversation that does not exist.

    Cure: use an id that ``POST /v1/conversations`` returned to the same API key.
    """

    status = 404
    code = "conversation_not_found"

    def __init__(self, conversation_id: str, *, param: str = "conversation_id", keeps: bool = True) -> None:
        message = f"There is no conversation {conversation_id!r}."
        super().__init__(message if keeps else message + STORES_NOTHING, param=param)


def no_conversation(conversation_id: str, *, param: str = "conversation_id", keeps: bool = True) -> InvalidRequest:
    """Return the error for a conversation that does not exist; as at OpenAI, a malformed id gets a 400, not a 404."""
    if conversation_id.startswith("conv_"):
        return ConversationNotFound(conversation_id, param=param, keeps=keeps)
    message = f"The id of a conversation begins with 'conv_', and {conversation_id!r} does not."
    return InvalidRequest(message, param=param, code="invalid_value")


class ConversationLocked(InvalidRequest):
    """Another response is being added to the conversation; the same request may succeed a moment later.

    Cure: send the request again when the other response has ended.
    """

    status = 409
    code = "conversation_locked"

    def __init__(self) -> None:
        super().__init__(
            "Another response is being added to this conversation. Try again in a few seconds.", param="conversation"
        )


class ItemNotFound(InvalidRequest):
    """The path or ``after`` names an item that is not in the conversation.

    Cure: use an id from the list of the items of that conversation.
    """

    status = 404
    code = "item_not_found"

    def __init__(self, item_id: str, *, param: str = "item_id") -> None:
        super().__init__(f"There is no item {item_id!r} in this conversation.", param=param)


class PreviousResponseUnfinished(InvalidRequest):
    """``previous_response_id`` names a response that has not ended yet, has failed, or was cancelled.

    Cure: wait for its end, or continue the response before it.
    """

    code = "previous_response_unfinished"

    def __init__(self, response_id: str, status: str) -> None:
        super().__init__(
            f"The response {response_id!r} is {status}: it cannot be continued.", param="previous_response_id"
        )


class Unauthorized(InvalidRequest):
    """The request has no valid API key.

    Cure: send the header ``Authorization: Bearer KEY``, with a key of the file ``--api-key-file`` or one of
    ``penstock keys make``.
    """

    status = 401
    code = "invalid_api_key"

    def __init__(self, *, has_key: bool = False, variable: str = "", is_set: bool = True) -> None:
        """Name the ``variable`` whose key opens the route, if it is another one than those of clients."""
        if variable:
            opens = f"the key in the server's {variable} opens it" if is_set else f"its key, {variable}, is not set"
            super().__init__(f"API keys do not open this route: {opens}.")
            return
        how = "that of the request is unknown, expired or revoked" if has_key else "'Authorization: Bearer <key>'"
        super().__init__(f"Give an API key of this server: {how}.")

    @property
    def challenge(self) -> str:
        """The value of ``WWW-Authenticate`` (RFC 6750)."""
        return "Bearer"


class InvalidToken(Unauthorized):
    """The bearer token of the request does not sign its client in; the message says why.

    Cure: get a new token from the issuer, for the audience in the file of ``--sign-in``, and send it.  The code is
    ``token_expired`` if that helps for certain.
    """

    code = "invalid_token"

    def __init__(self, problem: str, *, code: str | None = None) -> None:
        """Say what is wrong with the token, in the words of this server."""
        StageError.__init__(self, f"The bearer token of the request {problem}. Sign in again.", code=code)

    @property
    def challenge(self) -> str:
        """The value of ``WWW-Authenticate``, with the error of RFC 6750."""
        return f'Bearer error="invalid_token", error_description="{self.message}"'


class IssuerUnavailable(StageError):
    """The keys of the issuer of a bearer token are not known at the moment.

    Cure: try again; the log says why the server cannot fetch them.
    """

    status = 503
    code = "issuer_unavailable"
    seconds = 1.0

    def __init__(self, seconds: float) -> None:
        super().__init__("The issuer of the bearer token does not answer, so that the token cannot be verified.")
        self.seconds = seconds


class ForeignHost(InvalidRequest):
    """The ``Host`` of the request is not a name of this server.

    Cure: call the server by its address, allow the name with ``--allow-host``, or give the server API keys.
    """

    status = 403
    code = "host_not_allowed"


class ForeignOrigin(InvalidRequest):
    """The request comes from a web page that may not use this server.

    Cure: allow the origin of the page with ``--allow-origin``.
    """

    status = 403
    code = "origin_not_allowed"


class UnsupportedMediaType(InvalidRequest):
    """The body is compressed, or not declared as JSON.

    Cure: send the body uncompressed, with ``Content-Type: application/json``.
    """

    status = 415
    code = "unsupported_media_type"


class RequestTimeout(InvalidRequest):
    """The body did not arrive in time.

    Cure: send the request again, and all of its body at once.
    """

    status = 408
    code = "request_timeout"


class BodyTooLarge(InvalidRequest):
    """The body is over the server's limit.

    Cure: send less, or start the server with a larger ``--max-body-bytes``.
    """

    status = 413
    code = "request_too_large"


class ServerBusy(StageError):
    """Large bodies of other requests fill the memory for them; the same request may succeed a moment later.

    Cure: send the request again after ``Retry-After``.
    """

    status = 503
    code = "rate_limit_exceeded"


class StageFault(StageError):
    """A stage of the operator's broke a rule, such as the order of frames, or raised an error other than `StageError`.

    The client gets the ``culprit``, the stage or the engine that it runs, and the ``problem``.  ``str(error)``, for the
    operator, also has the ``message`` of the error that it raised, and the ``details``: the place in the code, and the
    last frames.

    Cure: the operator reads the log, which names the place in the code, and replays the recording of the response.
    """

    def __init__(self, culprit: str, problem: str, details: str, message: str = "") -> None:
        super().__init__(f"The {culprit} of this server {problem}.")
        self.args = (f"the {culprit} {problem}{message and ': '}{message} ({details})",)


class EngineFailed(StageError):
    """The engine gave up on this one request.

    ``str(error)``, for the operator, also has the ``details``, such as the address of the engine.

    Cure: send the request again; the operator reads the log of this server and that of the engine.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        if details:
            self.args = (f"{message} ({details})",)


class EngineDead(StageError):
    """The engine is gone and will not come back by itself.

    Cure: the operator restarts the engine; the log has the reason for its end.
    """

    status = 503


class EngineOverloaded(StageError):
    """The engine's queue or the background queue is full; the same request may succeed a moment later.

    The status is 503, as this is load and not the quota of a client; the code is OpenAI's.

    Cure: send the request again after ``Retry-After``; the operator adds engines or lets more requests wait.
    """

    status = 503
    code = "rate_limit_exceeded"


class LimitReached(StageError):
    """An API key has used up its requests per minute, or a key or an address has too many of something at once.

    The client may try again in ``seconds``.

    Cure: send the request again after ``Retry-After``; the operator raises the limit of the key in ``--limits``.
    """

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"
    seconds = 1.0

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class TokenLimitReached(LimitReached):
    """An API key has used up its tokens per minute.

    Cure: send the request again after ``Retry-After``; the operator raises the limit of the key in ``--limits``.
    """

    type = "tokens"


class StorageFull(StageError):
    """An API key stores as much as it may; it must delete something before it can store more.

    Cure: delete responses or conversations, or wait until they expire; the operator raises the limit of the key in
    ``--limits``.
    """

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"


class BudgetSpent(StageError):
    """A budget that the operator has set for a day or a month is spent; responses that run go on.

    ``budget`` names it, and ``again`` the time at which the next one begins.  Clients know the words: they are those of
    OpenAI, and those of Anthropic.

    Cure: wait for the time that the message names; the operator raises the budget in the file ``--accounts``.
    """

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"

    def __init__(self, budget: str, again: str) -> None:
        super().__init__(
            f"You exceeded your current quota, please check your plan and billing details: {budget} are used up. "
            f"You have reached your specified API usage limits. You will regain access on {again}."
        )


class DiskFull(StageError):
    """The disk of the store is almost full, and what is left is kept for deletions and running responses.

    Cure: delete files, vector stores or responses that are not needed any more; the operator makes room on the disk.
    """

    status = 507
    code = "insufficient_storage"

    def __init__(self) -> None:
        super().__init__("The disk of this server is almost full. Delete what is not needed any more, and try again.")


class ServerStopping(StageError):
    """The server is stopping and takes no new requests; another one may be up in a moment.

    Cure: send the request again in a moment.
    """

    status = 503

    def __init__(self) -> None:
        super().__init__("The server is stopping. Try again in a moment.")


class StoreFailed(StageError):
    """The store cannot be reached or does not work; the same request may succeed once it is back.

    Cure: the operator checks the database and its disk; ``GET /ready`` has the reason.
    """

    status = 503


class UpstreamFailed(StageError):
    """The server that answers such requests for this one cannot be reached, or does not answer.

    Cure: the operator checks the server that ``--embeddings`` or ``engine`` of the model names.
    """

    status = 502

    def __init__(self) -> None:
        super().__init__("The server that answers these requests for this one cannot be reached, or does not answer.")


class ServerUnreachable(StageError):
    """The server that runs this response cannot be reached from here; the same request may succeed in a moment.

    Cure: send the request again in a few seconds; the operator checks ``--peer-url`` of the servers.
    """

    status = 503

    def __init__(self) -> None:
        super().__init__("The server that makes this response cannot be reached. Try again in a few seconds.")


class ModelAway(StageError):
    """The response waits in the queue for a server of its model, because the servers that run do not serve that model.

    Cure: ask for the response without its stream until it has begun, or cancel it; the operator starts a server that
    serves the model.
    """

    status = 503

    def __init__(self, model: str) -> None:
        super().__init__(f"This response waits for a server that serves {model}. Try again later.")


class ModelUnavailable(StageError):
    """A model that starts as requests need it is not up: it starts, waits for its turn, or could not start.

    The client may try again in ``seconds``.

    Cure: send the request again after ``Retry-After``; the operator reads the log, which has the last lines of the
    process, or lets requests wait longer.
    """

    status = 503
    seconds = 1.0

    def __init__(self, model: str, reason: str, seconds: float = 1.0) -> None:
        super().__init__(f"The model {model!r} is not available: {reason}. Try again in {ceil(seconds)} s.")
        self.seconds = seconds


class ModelGone(StageError):
    """The response waited in the queue for a server of its model, and none came within ``--unserved-after``.

    Cure: send the request again with a model that ``GET /v1/models`` lists.
    """

    def __init__(self, model: str, waited: str) -> None:
        super().__init__(f"No server has served {model} for {waited}, which this response waited for.")


class RunInterrupted(StageError):
    """The server stopped while it ran this response.

    Cure: send the request again.
    """

    def __init__(self) -> None:
        super().__init__("The server ended while it ran this response.")


class Stopped(SystemExit):
    """A signal ends the start, and so the process, with status 0, as one that comes later does; no code handles it.

    Cure: start the server again.
    """


class CannotStart(Exception):
    """The server cannot start; the operator can mend what the message names.

    Cure: change the option that the message names.
    """


class CannotRun(Exception):
    """A command cannot do its work: it exits with this message and status 2.

    Cure: change the argument that the message names.
    """


def error_named(name: str, message: str) -> StageError | None:
    """Rebuild a recorded error from its class name and message; return None for a name that is no `StageError`."""
    kind = _KINDS.get(name)
    if kind is None:
        return None
    error = kind.__new__(kind)  # constructors of subclasses take other arguments and build the message themselves
    StageError.__init__(error, message)
    return error
