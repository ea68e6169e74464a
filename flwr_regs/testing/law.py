"""A law: a sentence, a check that raises where it is broken, and the verdict for a method."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr_regs.testing.method import LawBroken, Method, Skipped


@dataclass(frozen=True, eq=False)
class Law:
    """A law: its name, its sentence, its check, and the variants in which it is checked.

    ``check(method, **arguments)`` raises where the law is broken; `variants` maps a variant's name to the
    arguments.
    """

    name: str
    sentence: str
    check: Callable[..., None]
    variants: Mapping[str, Mapping[str, Any]]

    def judge(self, method: Method, variant: str = "") -> str:
        """Return ``"passed"``, ``"skipped: <why>"`` or ``"exempt: <why>"``; raise LawBroken otherwise."""
        at = f"law '{self.name}{f'/{variant}' if variant else ''}' ({self.sentence})"
        broken: Exception | None = None
        try:
            self.check(method, **self.variants[variant])
        except Skipped as why:
            return f"skipped: {why}"
        except Exception as error:  # a refusal, or whatever the method raises
            broken = error
        exempt = method.exempt.get(self.name) or method.exempt.get(f"{self.name}/{variant}")
        if exempt is None and broken is None:
            return "passed"
        raised = f"{type(broken).__name__}: {broken}"
        if exempt is None:
            if not isinstance(broken, LawBroken):
                at += ": it could not be checked, because the method failed"
                broken = LawBroken(raised)
            raise LawBroken(f"{at}: {broken}") from broken
        stated = f"the method is exempt from it (“{exempt.why}”), but"
        if broken is None:
            raise LawBroken(f"{at}: {stated} meets it: leave out the exemption")
        if exempt.refusal is None and not isinstance(broken, LawBroken):
            raise LawBroken(
                f"{at}: {stated} does not run; name the `refusal`: {raised}"
            ) from broken
        if exempt.refusal is not None and (
            isinstance(broken, LawBroken) or not re.search(exempt.refusal, str(broken))
        ):
            raise LawBroken(f"{at}: {stated} not refused with '{exempt.refusal}': {raised}")
        return f"exempt: {exempt.why}"


def law(
    sentence: str, variants: Mapping[str, Mapping[str, Any]] | None = None
) -> Callable[[Callable[..., None]], Law]:
    """Return what makes a check a law, which is named as the check is."""
    return lambda check: Law(
        check.__name__.replace("_", "-"), sentence, check, variants or {"": {}}
    )
