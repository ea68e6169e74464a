"""``flwr-regs``: the command line over plans, runs and results."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pkgutil
import re
import signal
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from flwr_regs.experiments.extras import table_beside
from flwr_regs.experiments.run.process_family import ending_in_time, on_farewell, say_farewell

# What loads torch is imported by the functions: `main` also ends an early Ctrl-C in order.


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the list of options."""

    def error(self, message: str) -> NoReturn:
        """Print the sentence, and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` shows what there is)\n")


def script() -> NoReturn:
    """Run the command line as the installed command does: end the process with its exit status.

    Where a signal has ended it, Python's own end is left out: to free all that torch has loaded takes
    seconds on a busy machine.
    """
    try:
        status: Any = main()
    except SystemExit as end:
        status = end.code
    if status in (130, 143):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done. 1: a run failed, or one of `bench` went wrong. 2: wrong usage. 130, 143: interrupted. 141: what
    read the output, such as ``head``, has enough.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # Windows writes to files in an older encoding
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        args = parsed(sys.argv[1:] if argv is None else argv)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        on_farewell("flwr-regs: interrupted")
        from flwr_regs.experiments.user_code import staying

        with ending_in_time(), staying():
            done: int | str = pkgutil.resolve_name(f"flwr_regs.experiments.{args.do}")(args)
            if isinstance(done, str):
                print(done)
        print(end="", flush=True)  # there may be no output
        return 0 if isinstance(done, str) else done
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        return 141
    except (KeyboardInterrupt, SystemExit) as end:
        code = 130 if isinstance(end, KeyboardInterrupt) else end.code
        if code not in (0, 2):  # which argparse has explained
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second press must not cut this short
            say_farewell()
        raise SystemExit(code) from None
    except (ValueError, OSError, ImportError) as error:
        print(f"flwr-regs: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"flwr-regs: the run failed: {error}", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():  # of who calls `main`
            signal.signal(number, handler or signal.SIG_DFL)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Return the words of a command line by name; exit with status 2 if they are none."""
    parser = _parser()
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(2)
    pairs = zip(("flwr-regs", *argv), argv, strict=False)
    empty = [before for before, word in pairs if not word.strip()]
    empty += [word[:-1] for word in argv if re.fullmatch("--[^=]*=", word)]
    if asked := [before for before in empty if before != "--title"]:  # which may be none
        parser.error(f"what follows {asked[0]} is empty: leave it out, or give a value")
    args, rest = parser.parse_known_args(argv)
    # settings, and a name beside them, may stand on either side of an option
    settings, named = "settings" in args, "name" in args
    if wrong := [r for r in rest if ("=" not in r and not named) or r[:1] == "-" or not settings]:
        from flwr_regs.experiments.settings import DEFAULTS

        name = wrong[0].lstrip("-").partition("=")[0].replace("_", "-")
        hint = f"; {name} is a setting: {name}=..." if name in DEFAULTS else ""
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{hint}")
    args.words = [*argv]
    if settings:
        words = [*filter(None, [getattr(args, "name", "")]), *args.settings, *rest]
        names = [word for word in words if named and ("=" not in word or word.endswith(".toml"))]
        if len(names) > 1:
            one = f"one {'key' if args.command == 'sweep' else 'card'} at a time"
            raise ValueError(f"{one}, not {' and '.join(names)}; settings are key=value")
        args.name, args.settings = "".join(names), [word for word in words if word not in names]
    if getattr(args, "workers", 1) < 1:
        parser.error(f"--workers must be at least 1, not {args.workers}")
    return args


def _parser() -> argparse.ArgumentParser:
    import flwr_regs

    what = "Compare federated methods on your data, and keep the results."
    parser = Parser(prog="flwr-regs", description=what)
    parser.add_argument("--version", action="version", version=f"flwr-regs {flwr_regs.__version__}")
    verbs = parser.add_subparsers(dest="command", required=True)

    told = table_beside(__file__)
    for name, verb in told["commands"].items():
        text = verb["help"]
        made = verbs.add_parser(
            name,
            help=text,
            description=textwrap.fill(f"{text[0].upper()}{text[1:]}. {verb.get('more', '')}", 80),
            epilog=verb.get("epilog"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        made.set_defaults(runner="process", gpus_per_client=0.0, **verb["defaults"])
        shared = [option for group in verb.get("groups", ()) for option in told["groups"][group]]
        for option in [*shared, *verb["options"]]:
            named = {k: TYPES[v] if k == "type" else v for k, v in option.items() if k != "name"}
            made.add_argument(*option["name"], **named)
    return parser


def _pair(what: str, between: str, example: str, text: str) -> tuple[float, float]:
    """Return two numbers, such as those of ``3.3x2.5``; what draws with them checks them."""
    with contextlib.suppress(ValueError):
        first, last = map(float, text.split(between))
        return first, last
    raise argparse.ArgumentTypeError(f"'{text}' is not a {what}: write {example}")


TYPES: dict[str, Any] = {"int": int, "float": float, "path": Path}
TYPES["inches"] = partial(_pair, "size", "x", "3.3x2.5")
TYPES["span"] = partial(_pair, "range", "..", "80..95")
"""Type in cli.toml -> what reads an option's text."""
