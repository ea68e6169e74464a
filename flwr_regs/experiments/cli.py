"""``flwr-regs``: the command line over plans, runs and results."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# What loads torch is imported by the functions: `main` also ends an early Ctrl-C in order.

EPILOG = "`flwr-regs list settings` shows every key=value, with its default and meaning."


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the list of options."""

    def error(self, message: str) -> NoReturn:
        """Print the sentence, and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` shows what there is)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done. 1: a run failed, or one of `bench` went wrong. 2: wrong usage. 130, 143: interrupted. 141: what
    read the output, such as ``head``, has enough.
    """
    try:
        status = _main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        return 141
    except KeyboardInterrupt:
        print("flwr-regs: interrupted", file=sys.stderr)
        return 130


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Return the words of a command line by name; exit with status 2 if they are none."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # settings, and the name of a card, may stand on either side of an option
    settings, card = "settings" in args, args.command == "bench"
    if wrong := [r for r in rest if ("=" not in r and not card) or r[:1] == "-" or not settings]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{_as_setting(wrong[0])}")
    if "settings" in args:
        args.settings = [*args.settings, *rest]
    args.words = [*argv]
    if getattr(args, "workers", 1) < 1:
        parser.error(f"--workers must be at least 1, not {args.workers}")
    return args


def _main(argv: Sequence[str]) -> int:
    args = parsed(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _do(args)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        print(f"flwr-regs: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"flwr-regs: the run failed: {error}", file=sys.stderr)
        return 1


def _do(args: argparse.Namespace) -> int:
    if args.do in ("listing", "protocols"):
        from flwr_regs.experiments import listings

        print(listings.listing(args) if args.do == "listing" else listings.protocols(args))
        return 0
    from flwr_regs.experiments import commands

    return int(getattr(commands, args.do)(args))


def _parser() -> argparse.ArgumentParser:
    import flwr_regs

    parser = Parser(
        prog="flwr-regs",
        description="Compare federated methods on your data, and keep the results.",
    )
    parser.add_argument("--version", action="version", version=f"flwr-regs {flwr_regs.__version__}")
    verbs = parser.add_subparsers(dest="command", required=True)

    def command(name: str, do: str, text: str, epilog: str = "") -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text, epilog=epilog)
        made.set_defaults(do=do, runner="process", gpus_per_client=0.0)
        return made

    def trains(made: argparse.ArgumentParser, seeds: str, words: str) -> None:
        made.add_argument("--seeds", default="", help=f"separated by commas ({seeds})")
        made.add_argument("--workers", type=int, default=1, help="runs at a time (1)")
        text = "go on with results: train what is missing"
        made.add_argument("--resume", type=Path, metavar="FOLDER", help=text)
        text = "say what would run and how long it takes"
        made.add_argument("--dry-run", action="store_true", help=text)
        text = "take the defaults from the pyproject.toml of this folder"
        made.add_argument("--app", type=Path, help=text)
        made.add_argument("settings", nargs="*", metavar=words, help="such as lr=0.1")

    run = command("run", "train", "compare methods, in one process or in Ray", EPILOG)
    runners = ("process", "stacked", "ray")
    run.add_argument("--runner", choices=runners, default="process", help="(process)")
    run.add_argument("--gpus-per-client", type=float, default=0.0, help="in Ray, e.g. 0.1 (0)")
    trains(run, "the setting seed", "key=value")
    text = "try values of one setting or parameter, or cases of any kind"
    sweep = command("sweep", "train", text, EPILOG)
    text = "a setting, such as lr, or a parameter, such as FedFOR.alpha"
    sweep.add_argument("key", nargs="?", help=text)
    sweep.add_argument("--values", help="separated by commas or semicolons")
    text = "in place of a key: a row of the table, its label and its settings"
    listed: dict[str, Any] = {"action": "append", "default": []}
    sweep.add_argument("--case", "-c", **listed, metavar="LABEL: key=value ...", help=text)
    trains(sweep, "1,2,3", "key=value")
    text = "tune each method equally on held-out data, then test it over seeds"
    wrong = "The exit status is 1 if a method diverges, fails, collapses, or has replies rejected. "
    bench = command("bench", "train", text, wrong + EPILOG)
    text = "what is tried: lr=0.02..2, FedFOR.alpha=0.01..1, or values: lr=0.1,0.3"
    bench.add_argument("--tune", "-t", **listed, metavar="KEY=LOW..HIGH", help=text)
    for name, text in (
        ("--tuning-seeds", "separated by commas (101, or the card's)"),
        ("--setting", "with a card: paper or reduced (the card's own)"),
        ("--methods", "with a card: its methods by name, or calls (all of its own)"),
        ("--panels", "with a card: some, separated by commas (all)"),
    ):
        bench.add_argument(name, default="", help=text)
    text = "for each method (8, or the card's)"
    bench.add_argument("--trials", type=int, help=text)
    text = "with a card: one panel, 200 examples, 2 rounds: seconds"
    bench.add_argument("--smoke", action="store_true", help=text)
    trains(bench, "1,2,3,4,5, or the card's", "[card] key=value")
    text = "train runs of results again, and compare"
    again = command("reproduce", "reproduce", text)
    again.add_argument("folder", type=Path, help="the results")
    again.add_argument("--seeds", default="", help="those to train, separated by commas (all)")
    text = "largest difference, in points (0.5)"
    again.add_argument("--tolerance", type=float, default=0.5, help=text)
    again.add_argument("--workers", type=int, default=1, help="runs at a time (1)")
    again.add_argument("settings", nargs="*", metavar="data-dir=...", help="where files are here")
    text = "train one client, and say what to give each client in Ray"
    taken = command("resources", "resources", text, EPILOG)
    taken.add_argument("settings", nargs="*", metavar="key=value", help="such as model=cnn")
    plot = command("plot", "plot", "draw results again, or a partition's labels", EPILOG)
    plot.add_argument("what", help="a results' folder, or the word partition")
    plot.add_argument("settings", nargs="*", metavar="key=value", help="of the partition")
    plot.add_argument("--title", help="in place of the data and the partition")
    plot.add_argument("--size", type=_inches, metavar="WIDTHxHEIGHT", help="in inches: 3.3x2.5")
    plot.add_argument("--font-size", type=float, default=8.0, help="in points (8)")
    for made in (taken, plot):
        made.add_argument("--app", type=Path, help=argparse.SUPPRESS)
    cards = command("protocols", "protocols", "list the protocol cards, or say what one holds")
    cards.add_argument("name", nargs="?", help="a card's name, or the path of your own")
    cards.add_argument("settings", nargs="*", metavar="data-dir=...", help="where files are here")
    listing = command("list", "listing", "list what there is")
    kinds = ("methods", "datasets", "models", "partitions", "settings", "metrics")
    listing.add_argument("what", choices=kinds)
    methods = command("methods", "listing", "list the methods, and what each costs")
    methods.set_defaults(what="methods")
    methods.add_argument("name", nargs="?", help="one method: its costs, and what it refuses")
    return parser


def _inches(text: str) -> tuple[float, float]:
    """Return the width and height of ``3.3x2.5``."""
    width, height = map(float, text.split("x"))
    return width, height


def _as_setting(word: str) -> str:
    """Return how to write a setting that stands there as an option."""
    from flwr_regs.experiments.settings import DEFAULTS

    name = word.lstrip("-").partition("=")[0].replace("_", "-")
    return f"; {name} is a setting: {name}=..." if name in DEFAULTS else ""
