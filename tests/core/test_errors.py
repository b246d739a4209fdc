import pytest

from octavo_core import errors
from octavo_core.errors import RequestFailedError, error_named


@pytest.mark.parametrize("kind", ["ModelError", "ConfigError", "ContextLengthError"])
def test_a_users_mistake_keeps_its_class_and_field(kind: str) -> None:
    error = error_named(kind, "no.", "x", default=RequestFailedError)
    assert type(error) is getattr(errors, kind)
    assert isinstance(error, errors.UserError)
    assert (error.message, error.field) == ("no.", "x")


def test_a_fault_of_ours_keeps_its_class() -> None:
    error = error_named("EngineDeadError", "gone", default=RequestFailedError)
    assert type(error) is errors.EngineDeadError
    assert str(error) == "gone"


@pytest.mark.parametrize("kind", ["KeyError", "UserError", "OctavoError", "annotations", "os", ""])
def test_any_other_name_becomes_the_default(kind: str) -> None:
    assert type(error_named(kind, "x", default=RequestFailedError)) is RequestFailedError
