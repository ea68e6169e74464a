"""Text and JSON of other machines: short and printable."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_regs.wire.text import named, one_line, quoted, read_json, shown
from tests.conftest import peak


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(st.text(st.characters(), max_size=700), st.integers(20, 100))
def test_shown_text_is_short_and_printable(text: str, limit: int) -> None:
    assert one_line(text).isprintable()
    for made in (shown(text, limit), quoted(text, limit)):
        assert len(made) <= limit
        assert made.isprintable()
    if text.isprintable() and len(text) <= limit:
        assert shown(text, limit) == text


def test_what_hides_is_escaped() -> None:
    odd = "\x1b[31m\u202e\u200b\ud800\x85\n"
    assert shown(odd) == r"\x1b[31m\u202e\u200b\ud800\x85\n"
    assert shown("Größe → 1e−3 本") == "Größe → 1e−3 本"
    assert named(["b\n", "a"]) == r"['a', 'b\\n']"
    assert named(str(i) for i in range(25)).endswith("and 15 more")


def test_a_long_text_is_not_copied() -> None:
    text, many = "A\n" * 10_000_000, [f"{i}" for i in range(1000)]

    def made() -> list[str]:
        return [shown(text), one_line(text), quoted(text), quoted([text] * 5), named([text, *many])]

    assert peak(made) < 1_000_000
    assert max(map(len, made())) < 2000


def test_any_value_can_be_quoted() -> None:
    for value in (10**5000, {"a": "b" * 10**6}, b"x" * 10**6, object(), [[]] * 10**5):
        assert len(quoted(value, 80)) <= 80


def test_what_is_no_json_is_a_value_error() -> None:
    assert read_json("[1, 2]") == [1, 2]
    for value in ("[" * 100_000, "[" * 100_000 + "]" * 100_000, "x", b"[]", None, "1" * 5000):
        with pytest.raises(ValueError, match="expected JSON text"):
            read_json(value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected at most"):
        read_json("[" + "1," * 2**21 + "1]")
