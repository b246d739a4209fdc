"""The errors that Octavo raises on purpose.

OctavoError
├── UserError                   the caller can mend it
│   ├── InvalidRequestError     one request is wrong            (HTTP 400)
│   │   └── ContextLengthError  prompt or answer does not fit   (HTTP 400)
│   ├── QueueFullError          too much waits already          (HTTP 429)
│   ├── ConfigError             a flag, variable or file value  (start-up)
│   └── ModelError              a model folder, file or tensor  (start-up)
└── EngineError                 ours
    ├── RequestFailedError      one request failed              (HTTP 500)
    ├── DeadlineExceededError   one request took too long       (HTTP 504)
    └── EngineDeadError         the engine process is gone      (HTTP 503)
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error that Octavo raises on purpose."""


class UserError(OctavoError, ValueError):
    """Something the caller can mend.

    Args:
        message: One sentence for a person. It should already name the field,
            the value, the limit and the knob to turn.
        field: Name of the request field, flag or file at fault.
        code: Machine-readable word, for example ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code


class InvalidRequestError(UserError):
    """A request that can't be served as it stands (HTTP 400)."""


class ContextLengthError(InvalidRequestError):
    """A prompt, or a prompt with its answer, that is longer than the model or the KV cache."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, field=field, code="context_length_exceeded")


class QueueFullError(UserError):
    """The server has as much waiting work as it was told to take (HTTP 429)."""


class ConfigError(UserError):
    """A flag, environment variable or configuration file holds a value that can't work."""


class ModelError(UserError):
    """A model folder, file or tensor is missing, damaged or not supported."""


class EngineError(OctavoError):
    """A fault of the engine, not of the request."""


class RequestFailedError(EngineError):
    """The engine failed while it computed one request (HTTP 500)."""


class DeadlineExceededError(EngineError):
    """The time that a request was given has passed before its answer was complete (HTTP 504)."""


class EngineDeadError(EngineError):
    """The engine process has ended; requests in flight are lost (HTTP 503)."""


def error_named(
    kind: str, message: str, field: str | None = None, *, default: type[EngineError]
) -> OctavoError:
    """Make an error again that crossed to another process as the name of its class.

    Args:
        kind: Name of a class of this module.
        message: The error's message.
        field: What a `UserError` names as being at fault.
        default: Class to use where `kind` is none of ours, or a base that says too little.
    """
    error_type = globals().get(kind)
    if not isinstance(error_type, type) or error_type in (OctavoError, UserError):
        return default(message)
    if issubclass(error_type, UserError):
        return error_type(message, field=field)
    if issubclass(error_type, EngineError):
        return error_type(message)
    return default(message)
