from __future__ import annotations

import pytest

from octavo_client import errors
from octavo_client.errors import error_from_response, read_error


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.BadRequestError),
        (401, errors.AuthenticationError),
        (403, errors.AuthenticationError),
        (404, errors.NotFoundError),
        (413, errors.BadRequestError),
        (418, errors.APIError),
        (422, errors.BadRequestError),
        (429, errors.RateLimitError),
        (500, errors.ServerError),
        (503, errors.ServerError),
        (302, errors.APIError),
    ],
)
def test_status_decides_the_class(status: int, kind: type[errors.APIError]) -> None:
    error = error_from_response(status, b"")
    assert type(error) is kind
    assert error.status == status


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"message": "hm"}', "hm"),
        (b"<h1>Bad Gateway</h1>", "<h1>Bad Gateway</h1>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"[1]", "[1]"),
        (b"", ""),
    ],
)
def test_any_body_gives_a_message(body: bytes, message: str) -> None:
    assert read_error(body).message == message


def test_fields_of_openais_error() -> None:
    body = b'{"error": {"message": "m", "type": "t", "param": "top_p", "code": "bad", "x": 1}}'
    error = error_from_response(400, body, request_id="r1", retry_after=2.0)
    assert (error.message, error.param, error.code) == ("m", "top_p", "bad")
    assert (error.request_id, error.retry_after) == ("r1", 2.0)
    assert str(error) == "m (HTTP 400)"


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Each class is drawn below its base, and no class is missing."""
    drawn: dict[str, int] = {}
    for line in (errors.__doc__ or "").splitlines():
        words = line.replace("│", " ").replace("├──", "   ").replace("└──", "   ").split()
        if words and words[0].endswith("Error"):
            drawn[words[0]] = line.index(words[0])
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert set(drawn) == {c.__name__ for c in classes}
    for cls in classes[1:]:
        base = cls.__mro__[1].__name__
        assert drawn[cls.__name__] == drawn[base] + 4
