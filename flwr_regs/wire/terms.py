"""The terms that a user gives: instances to a strategy, classes to a client. Refuses what is mixed up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr_regs.term import Term


def check_instances(terms: Any, who: str) -> Sequence[Term]:
    """Return the terms of a strategy of class `who`; TypeError unless they are a list of instances."""
    _check_list(terms, who, f"terms, such as {who}([Proximal(0.1)])")
    for term in terms:
        if isinstance(term, Term):
            continue
        hint = " (a client's are classes)" if _is_term_class(term) else ""
        if inner_terms := getattr(getattr(term, "term", None), "terms", ()):
            hint = f"; give its terms, {list(inner_terms)}"
        raise TypeError(
            f"{who}'s terms are instances, such as Proximal(0.1), not {named(term)}{hint}"
        )
    return list(terms)


def check_classes(terms: Any, who: str) -> tuple[type[Term], ...]:
    """Return the terms of a client of class `who`; TypeError unless they are a list of classes."""
    _check_list(terms, who, "classes of terms, such as terms=[Proximal]")
    for term in terms:
        if not _is_term_class(term):
            hint = "; its hyper-parameters come from the strategy" * isinstance(term, Term)
            raise TypeError(f"{who}'s terms are classes, such as Proximal, not {named(term)}{hint}")
    return tuple(terms)


def _check_list(terms: Any, who: str, expected: str) -> None:
    if not isinstance(terms, Sequence) or isinstance(terms, str):
        raise TypeError(f"{who} takes a list of {expected}, not {named(terms)}")


def _is_term_class(term: Any) -> bool:
    return isinstance(term, type) and issubclass(term, Term)


def named(given: Any) -> str:
    """Return what was given, as a message calls it."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if isinstance(getattr(given, "term", None), Term):
        return f"the strategy {type(given).__name__}"
    return f"the term {given!r}" if isinstance(given, Term) else repr(given)
