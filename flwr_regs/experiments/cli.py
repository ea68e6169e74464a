"""``flwr-regs``: the command line. Its `run` is one simulation with a reliable exit status.

``flwr run`` exits 0 when a run failed. It leaves a server behind that keeps the folder and environment of
its first start, and it installs the app's dependencies again for every run. ``flwr-regs run`` starts its
own SuperLink in the current folder, asks for as many clients as the job needs, follows the run, checks
the results and stops the SuperLink.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from flwr_regs.experiments import calls
from flwr_regs.experiments.build import with_argument
from flwr_regs.experiments.data import load, missing_extra
from flwr_regs.experiments.job import Job


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status (0 done, 1 the run failed, 2 wrong usage)."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command == "methods":
        from flwr_regs.experiments import methods_table

        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        methods_table.show(args.markdown)
        return 0
    # settings may stand on either side of an option
    if wrong := [r for r in rest if "=" not in r or r.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    settings = [*args.settings, *rest]
    try:
        if args.command != "run":
            from flwr_regs.experiments.sweep import sweep

            key, cases = _cases(args, settings)
            jobs = {
                label: [
                    read_settings(args.app, [*settings, *own, f"seed={s}"])[1]
                    for s in args.seeds.split(",")
                ]
                for label, own in cases.items()
            }
            sweep(key, jobs, out_folder(next(iter(jobs.values()))[0]), args.workers)
            return 0
        config, job = read_settings(args.app, settings)
    except (ValueError, OSError, ImportError) as error:
        print(f"flwr-regs: {error}", file=sys.stderr)
        return 2
    return _run(args.app, config, job, args.gpus_per_client)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flwr-regs", description="Compare methods by simulation.")
    commands = parser.add_subparsers(dest="command", required=True)
    epilog = "Settings and their defaults are in pyproject.toml under [tool.flwr.app.config]."
    run = commands.add_parser("run", help="compare methods in a Ray simulation", epilog=epilog)
    run.add_argument("--gpus-per-client", type=float, default=0.0, help="e.g. 0.1 (default: 0)")
    tune = commands.add_parser(
        "sweep", help="try values of one setting or parameter, without Ray", epilog=epilog
    )
    tune.add_argument(
        "key", help="a setting, e.g. lr or methods, or a method's parameter, e.g. FedFOR.alpha"
    )
    tune.add_argument("--values", required=True, help="separated by commas or semicolons")
    several = commands.add_parser(
        "compare", help="compare settings of any kind over seeds, without Ray", epilog=epilog
    )
    several.add_argument(
        "--case",
        action="append",
        required=True,
        metavar="LABEL: key=value ...",
        help="a row of the table: its label and its settings",
    )
    listing = commands.add_parser("methods", help="list the methods, and what each costs")
    listing.add_argument("--markdown", action="store_true", help="every column, for a page")
    for command in (tune, several):
        command.add_argument("--seeds", default="1,2,3", help="separated by commas")
        command.add_argument("--workers", type=int, default=1, help="runs at a time (default: 1)")
    for command in (run, tune, several):
        command.add_argument("settings", nargs="*", metavar="key=value", help="e.g. lr=0.1")
        command.add_argument("--app", type=Path, default=Path(), help="the project's folder")
    return parser


def _cases(args: argparse.Namespace, settings: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """Return (the table's first heading, label -> settings) of a sweep or a comparison."""
    if args.command == "sweep":
        target, dot, name = args.key.rpartition(".")
        if not dot:
            return args.key, {v: [f"{args.key}={v}"] for v in calls.values(args.values)}
        given = [s.removeprefix("methods=") for s in settings if s.startswith("methods=")]
        methods = given[-1] if given else target
        return args.key, {
            v: [f"methods={with_argument(methods, target, name, calls.literal(v), os.getcwd())}"]
            for v in calls.values(args.values)
        }
    pairs = [read_case(text) for text in args.case]
    if len(cases := dict(pairs)) < len(pairs):
        raise ValueError(f"each --case needs a label of its own, not {args.case}")
    return "case", cases


def _run(app: Path, config: dict[str, Any], job: Job, gpus: float) -> int:
    """Compare the job's methods in a simulation of its own; return the exit status."""
    if importlib.util.find_spec("ray") is None:
        print(f"flwr-regs: {missing_extra('ray', 'the simulation')}", file=sys.stderr)
        return 2
    try:
        job.check_data()
    except (ValueError, OSError, ImportError) as error:
        print(f"flwr-regs: {error}", file=sys.stderr)
        return 2
    load.cache_clear()  # the images: the clients load their own
    out = out_folder(job)
    config["out"] = str(out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the SuperLink is stopped
    try:
        with tempfile.TemporaryDirectory(prefix="flwr-regs-") as home:
            status = simulate(app.resolve(), config, job.num_clients, gpus, Path(home))
    except RuntimeError as error:
        status = str(error)
    except KeyboardInterrupt:
        print(f"flwr-regs: interrupted; the results so far are in {out}", file=sys.stderr)
        return 130
    history = out / "history.json"
    saved = json.loads(history.read_text())["methods"] if history.is_file() else {}
    done = [name for name, method in saved.items() if "error" not in method]
    if not status.startswith("finished:completed") or done != job.method_names:
        print(
            f"flwr-regs: the run failed ({status}); methods finished: {done or 'none'}",
            file=sys.stderr,
        )
        return 1
    return 0


def read_case(text: str) -> tuple[str, list[str]]:
    """Return (label, settings) of ``"LABEL: key=value key=value"``; raise ValueError for any other text."""
    label, colon, settings = text.partition(":")
    if not colon or not label.strip():
        raise ValueError(f"--case must look like 'LABEL: key=value ...', not '{text}'")
    return label.strip(), calls.words(settings)


def out_folder(job: Job) -> Path:
    """Return (and make) the job's ``out``, by default ``results/<time>`` in the current folder."""
    out = Path(job.out or Path.cwd() / "results" / time.strftime("%Y%m%d-%H%M%S"))
    out.mkdir(parents=True, exist_ok=True)
    return out


def read_settings(app: Path, settings: Sequence[str]) -> tuple[dict[str, Any], Job]:
    """Return (the settings that differ from the defaults, the checked job).

    Raises ValueError or OSError that says what is wrong.
    """
    pyproject = app.resolve() / "pyproject.toml"
    if not pyproject.is_file():
        raise ValueError(
            f"{app.resolve()} holds no pyproject.toml: call this in a checkout (see --app)"
        )
    defaults = tomllib.loads(pyproject.read_text()).get("tool", {}).get("flwr", {}).get("app", {})
    defaults = defaults.get("config", {})
    given: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"'{text}' is not of the form key=value")
        try:
            given[key] = (
                value if isinstance(defaults.get(key), str) else tomllib.loads(f"v={value}")["v"]
            )
        except tomllib.TOMLDecodeError:
            given[key] = value
    if not (given.get("code-dir") or defaults.get("code-dir")):
        given["code-dir"] = os.getcwd()
    try:
        job = Job.from_run_config({**defaults, **given})
        job.check()
    except TypeError as error:  # an argument of a method
        raise ValueError(str(error)) from error
    return given, job


def simulate(app: Path, config: dict[str, Any], clients: int, gpus: float, home: Path) -> str:
    """Run the app on its own SuperLink; return the run's final status."""
    env = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    tools = Path(sys.executable).parent  # this environment's commands, even if it is not activated
    env["PATH"] = f"{tools}{os.pathsep}{env.get('PATH', '')}"
    with superlink(home, env) as port:
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "job"\n[superlink.job]\n'
            f'address = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in config.items()
        ]
        (home / "run.toml").write_text("\n".join(lines))
        run = ["flwr", "run", str(app), "job", "--stream", "--run-config", str(home / "run.toml")]
        run += ["--federation-config", f"num-supernodes={clients} client-resources-num-cpus=1"]
        if gpus:
            run[-1] += f" client-resources-num-gpus={gpus}"
        code = subprocess.run(run, env=env, check=False).returncode
        if code != 0:
            return f"flwr run exited with status {code}"
        listed = subprocess.run(
            ["flwr", "ls", "job", "--format", "json"], env=env, check=True, capture_output=True
        )
        runs = json.loads(listed.stdout)["runs"]
        if not runs:
            return "no run was started"
        return " ".join(str(runs[0].get(k, "")) for k in ("status", "status-details")).strip()


@contextlib.contextmanager
def superlink(home: Path, env: dict[str, str]) -> Iterator[int]:
    """Start a SuperLink for simulations on a free port of 127.0.0.1; stop it at the end."""
    ports = []
    with contextlib.ExitStack() as held:  # both held open, so that they differ
        for _ in range(2):
            s = held.enter_context(socket.socket())
            s.bind(("127.0.0.1", 0))
            ports.append(s.getsockname()[1])
    command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1"]
    command += ["--port", str(ports[0]), "--control-api-address", f"127.0.0.1:{ports[1]}"]
    log = home / "superlink.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, env=env, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60
        while not _healthy(ports[0]):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the SuperLink did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield ports[0]
    finally:
        ours = _descendants(process.pid)  # Ray's processes are in sessions of their own
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _healthy(port: int) -> bool:
    """Return whether a server reports that it is healthy; never through a proxy."""
    connection = HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, and those that they started (Linux; else none)."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # "pid (name) state ppid …", and the name may hold spaces and brackets
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


if __name__ == "__main__":
    sys.exit(main())
