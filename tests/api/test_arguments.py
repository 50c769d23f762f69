"""What Python callers may pass: help() says it, a wrong argument is named before any call, errors are one family."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import tandem
from tandem.clients.completion import check_request

NOWHERE = "127.0.0.1:1"
KINDS = (tandem.Client, tandem.AsyncClient)


# --- signatures ---


def test_the_clients_do_not_drift_apart() -> None:
    """The blocking client's methods have the asynchronous one's arguments and words; only what they return differs."""
    own = {name for name in vars(tandem.Client) if not name.startswith("_")}
    assert own == {name for name in vars(tandem.AsyncClient) if not name.startswith("_")} - {"events"} | {
        "last_statistics"
    }
    for name in ("generate", "stream", "model_info", "close"):
        one, other = getattr(tandem.Client, name), getattr(tandem.AsyncClient, name)
        assert inspect.signature(one).parameters == inspect.signature(other).parameters
        assert inspect.getdoc(one) == inspect.getdoc(other)
    made = [inspect.signature(kind.__init__).parameters for kind in KINDS]
    assert made[0] == made[1] and "wait_seconds" in made[0]


# --- wrong arguments ---

WRONG_TYPES = [
    ({"max_new_tokens": "12"}, "max_new_tokens must be a positive integer, or None, not '12'"),
    ({"max_new_tokens": True}, "max_new_tokens must be a positive integer, or None, not True"),
    ({"prompt": ["a", "b"]}, "prompt must be a text, or a list of token ids, not ['a', 'b']"),
    ({"prompt": ["x" * 500]}, "prompt must be a text, or a list of token ids, not ['xxx"),
    ({"sampling": {"temperature": 1}}, "sampling must be a tandem.SamplingParams, or None, not {'temperature': 1}"),
    ({"stop": ["a", None]}, "stop must be a string, or a list of strings, not ['a', None]"),
    ({"timeout": "3"}, "timeout must be a number of seconds above 0, or None, not '3'"),
    ({"chat": "yes"}, "chat must be True or False, not 'yes'"),
    ({"ignore_end_of_sequence": 1}, "ignore_end_of_sequence must be True or False, not 1"),
    ({"speculation_length": "auto"}, "speculation_length must be an integer from 0 on, or None, not 'auto'"),
    ({"rule": None}, 'rule must be "agreement" or "rejection", not None'),
    ({"logprobs": True}, "logprobs must be an integer from 0 to 20, or None, not True"),
    ({"adapter": None}, "adapter must be a string, the name of an adapter, not None"),
    ({"drafts": None}, 'drafts must be "auto", "none", "lookup", "model" or "head", not None'),
    ({"prediction": None}, "prediction must be a string, not None"),
    ({"receipt": "yes"}, "receipt must be True or False, not 'yes'"),
    ({"max_tokens": 5}, "a request has no option max_tokens; did you mean max_new_tokens?"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG_TYPES, ids=[said[:40] for _, said in WRONG_TYPES])
def test_an_argument_of_the_wrong_type_is_named_with_what_was_expected(arguments: dict[str, Any], said: str) -> None:
    with tandem.Client(NOWHERE) as client:
        for method in (client.generate, client.stream):
            with pytest.raises(TypeError) as told:
                method(**({"prompt": "x"} | arguments))
            error = told.value
            assert isinstance(error, tandem.TandemError) and str(error).startswith(said) and len(str(error)) < 200
            assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
            assert error.field == next(iter(arguments))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tandem.Client([]), "endpoints must be a string"),
        (lambda: tandem.Client("a:1,a:1"), "endpoints: 'a:1,a:1' names a server twice"),
        (lambda: tandem.Client(NOWHERE, service="Nobody"), "service: 'Nobody' is not one of TargetVerifier"),
        (lambda: tandem.Client(NOWHERE, credentials="token"), "credentials must be a tandem.Credentials"),  # type: ignore[arg-type]
        (lambda: tandem.Client(NOWHERE, retry_seconds="1"), "retry_seconds must be a number of seconds"),  # type: ignore[arg-type]
        (lambda: tandem.Client(NOWHERE, retry_seconds=-1), "retry_seconds: -1 is below 0"),
        (lambda: tandem.Client(NOWHERE, wait_seconds=None), "wait_seconds must be a number"),  # type: ignore[arg-type]
        (lambda: tandem.DraftSession(NOWHERE, None), "drafter must be an object with a method propose"),  # type: ignore[arg-type]
        (lambda: tandem.SamplingParams(temperature="0.8"), "temperature must be a number, not '0.8'"),  # type: ignore[arg-type]
        (lambda: tandem.SamplingParams(logit_bias=(("a", 1.0),)), "logit_bias must be pairs of token id"),  # type: ignore[arg-type]
        (lambda: tandem.Credentials(ca=7), "ca must be a string, or None, not 7"),  # type: ignore[arg-type]
        (lambda: tandem.SamplingParams(structure="x"), "structure must be a tandem.Structure, or None, not 'x'"),  # type: ignore[arg-type]
        (lambda: tandem.Structure("regex", "x"), "kind must be a tandem.StructureKind, not 'regex'"),  # type: ignore[arg-type]
        (lambda: tandem.Structure(tandem.StructureKind.JSON_SCHEMA, {}), "text must be a string, not {}"),  # type: ignore[arg-type]
        (lambda: tandem.Credentials(ca="/nowhere/ca.pem"), "/nowhere/ca.pem"),
        (lambda: tandem.Credentials(cert="x"), "given without"),
        (lambda: tandem.Credentials(token_env="NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE holds no token"),
        (
            lambda: tandem.Client("10.1.2.3:1", credentials=tandem.Credentials(token_env="PATH_OF_TOKEN")),
            "the token would be sent to 10.1.2.3:1 in clear text",
        ),
    ],
)
def test_what_is_made_of_wrong_arguments_raises_the_family_too(
    make: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH_OF_TOKEN", "a-long-enough-token")
    with pytest.raises(tandem.TandemError) as told:
        make()
    assert said in str(told.value) and told.value.field and told.value.code == "INVALID_ARGUMENT"
    assert isinstance(told.value, ValueError)


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    check_request(numpy.array([1, 2]).tolist(), None, (), numpy.float32(1), {"max_new_tokens": numpy.int64(3)})
    tandem.SamplingParams(temperature=numpy.float32(0.5), seed=numpy.int64(7))
