"""The command line: `flashfl run | compare | reproduce | data | report | figure | watch | export | ...`."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .core.errors import ConfigError, FlashError
from .report.command import add_commands
from .run.datacli import add_data
from .run.options import DIGITS_DENSITY, add_listings
from .run.sealed import KEY

if TYPE_CHECKING:
    from .run.config import RunConfig

_DEMO_METHODS = "dense,nst,pdst,spdst,jmwst"
_COMPARED = ("accuracy %", "best %", "personal %", "density", "up / round", "down / round")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. An error that the user can fix becomes one clear line."""
    parser, commands = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    # On the command line a warning has no place in the user's code to point at.
    warnings.formatwarning = lambda message, *_: f"flashfl: warning: {message}\n"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that cannot be encoded must not end a command
            stream.reconfigure(errors="replace")
    try:
        overrides: dict[str, str] = {}
        if words and words[0] in commands:
            words, overrides = _settings_apart(words, commands[words[0]])
        args = parser.parse_args(words)
        if not hasattr(args, "go"):
            parser.print_help()
            return 2
        for file in getattr(args, "load", ()):
            from .run.code import load_file

            load_file(file)
        if getattr(args, "checkpoint_key", None):
            os.environ[KEY] = str(args.checkpoint_key)
        return int(args.go(args, overrides))
    except KeyboardInterrupt:
        again = {
            "run": "; add --resume to continue after the last finished round",
            "compare": "; run the same command again to continue",
            "reproduce": "; run the same command again to continue",
        }
        print(f"\nflashfl: interrupted{again.get(words[0] if words else '', '')}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except (FlashError, OSError) as error:  # an OSError: for example a full disk
        print(f"flashfl: {error}", file=sys.stderr)
        return 1


def _settings_apart(words: list[str], command: argparse.ArgumentParser) -> tuple[list[str], dict[str, str]]:
    """Separate settings, `--name value` or `--name=value`, from the command's own options."""
    own, settings = [], {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name in command._option_string_actions or not command.get_default("settings"):
            own.append(word)
            continue
        if not equals:
            value = next(rest, "--")  # an empty word is a value
            if value.startswith("--"):
                raise ConfigError(f"{name} needs a value: {name} VALUE")
        settings[name[2:].replace("-", "_")] = value
    return own, settings


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="flashfl",
        description=(
            "Train sparse models with federated learning: FLASH and related methods. Messages are sparse too, so "
            "fewer bytes travel."
        ),
        epilog="Give any setting as --name value, for instance --density 0.05 --rounds 100 --alpha 0.1. "
        "`flashfl methods` lists the settings of methods, `flashfl methods NAME` explains one method, `flashfl "
        "settings` lists all other settings.",
    )
    parser.add_argument("--version", action="version", version=f"flashfl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, go: Callable[..., int], help: str, settings: bool = False) -> argparse.ArgumentParser:
        epilog = "Give any setting as --name value; `flashfl methods` and `flashfl settings` list them."
        if name == "compare":
            epilog += " --METHOD.name value is for one method only, for instance --spdst.density 0.1."
        sub = commands.add_parser(
            name, help=help, description=help, allow_abbrev=False, epilog=epilog if settings else None
        )
        sub.set_defaults(go=go, settings=settings)
        return sub

    run = add("run", _run, "train one method on one task", settings=True)
    run.add_argument("--out", type=Path, help="folder for results and checkpoints (default: runs/TASK-METHOD-SEED)")
    run.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint in --out; settings need not be repeated, and --rounds may be raised",
    )
    run.add_argument("--overwrite", action="store_true", help="start again even if the folder holds a run")
    run.add_argument("--quiet", action="store_true", help="show only the final line")

    comparison = add("compare", _compare, "train several methods with several seeds and print a table", settings=True)
    comparison.add_argument(
        "--methods", default=_DEMO_METHODS, help=f"comma-separated names, or all (default: {_DEMO_METHODS})"
    )
    comparison.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    comparison.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder (default: runs/compare)")
    said = "replace runs in the folder that were made with other settings or other code"
    comparison.add_argument("--overwrite", action="store_true", help=said)
    comparison.add_argument("--quiet", action="store_true", help="show only the table")

    export = add(
        "export",
        _export,
        "write the model of a run to a file: the final one, or that of the last checkpoint if the run has not ended",
    )
    export.add_argument("run", type=Path, help="folder of a run")
    said = "safetensors: all weights, and the masks in a second file; sparse: active weights; onnx: for other runtimes"
    export.add_argument("--format", choices=("safetensors", "sparse", "onnx"), default="safetensors", help=said)
    said = "file to write (default: RUN/model[-VIEW] with the format's ending)"
    export.add_argument("--out", "--to", type=Path, help=said)  # --to: the name it had once
    export.add_argument(
        "--view",
        default="",
        help="which model to export, if the run has several (default: the one that reports show). A wrong name lists "
        "them",
    )
    add_data(add)
    add_commands(add)
    _add_shared(run, comparison, export, add_listings(add))
    return parser, commands.choices


def _add_shared(
    run: argparse.ArgumentParser,
    comparison: argparse.ArgumentParser,
    export: argparse.ArgumentParser,
    methods: argparse.ArgumentParser,
) -> None:
    """The options that several commands have."""
    for command in (run, comparison):
        said = f"TOML file with tables task, train, method (default: embedded digits at density {DIGITS_DENSITY})"
        command.add_argument("config", nargs="?", type=Path, help=said)
        command.add_argument(
            "--quick", action="store_true", help="reduce data, rounds and clients to a test of about a minute"
        )
        command.add_argument(
            "--central", action="store_true", help="train without federation: one client holds all data"
        )
        said = "folder of data sets (default: the environment variable FLASHFL_DATA, or ./data)"
        command.add_argument("--data-root", dest="root", help=said)
    for command in (run, comparison, export):
        said = (
            "file with a secret key: checkpoints are signed with it, and unsigned ones are rejected (default: the "
            f"file that the environment variable {KEY} names)"
        )
        command.add_argument("--checkpoint-key", type=Path, metavar="FILE", help=said)
    for command in (run, comparison, export, methods):
        said = (
            "Python file to import first, for custom methods: flashfl.METHODS[NAME] = CLASS. May be given several times"
        )
        command.add_argument("--load", type=Path, metavar="FILE.py", action="append", default=[], help=said)


def _config(args: argparse.Namespace, overrides: dict[str, str]) -> RunConfig:
    from .run.config import load_toml, make_config
    from .run.quick import central, quick

    data = load_toml(args.config) if args.config else {}
    if args.root:
        overrides = {**overrides, "data_root": args.root}
    if args.central:
        overrides = central(overrides)
    names = {name.rpartition(".")[2]: value for name, value in overrides.items()}
    if args.config is None and "density" not in names and names.get("dataset", "digits") == "digits":
        # The embedded task is small: methods differ visibly at 2 %, and hardly at 5 % (see LOG.md).
        data = {**data, "method": {"density": DIGITS_DENSITY}}
    return quick(data, overrides) if args.quick else make_config(data, overrides)


def _resumed_config(folder: Path, overrides: dict[str, str]) -> RunConfig | None:
    """The settings of the run in a folder, with changes; None if it does not record them."""
    from .run.config import make_config
    from .run.results import RESULTS, Results

    path = folder / RESULTS
    held = Results.read(folder) if path.is_file() and path.stat().st_size else None  # a damaged file is an error
    recorded = held.header.get("config") if held else None
    if recorded == {}:
        raise ConfigError(
            f"{folder} was made in Python: continue it there, with fl.simulate(method, task, rounds, "
            f"folder={str(folder)!r}, resume=True)"
        )
    return make_config(recorded, overrides) if recorded else None


def _run(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .run.compare import run_config
    from .run.progress import amount
    from .run.results import RESULTS

    config = _resumed_config(args.out, overrides) if args.resume and args.out and not args.config else None
    config = config or _config(args, overrides)
    dataset = re.sub(r"[^\w.]+", "-", config.task.dataset).strip("-.")  # folder:PATH must not become a path here
    folder = args.out or Path("runs") / f"{dataset}-{config.method.name}-seed{config.train.seed}"
    chosen = args.config or {"method", "dataset"} & {name.rpartition(".")[2] for name in overrides}
    if args.resume and not chosen and not folder.exists():
        raise ConfigError(f"--resume: {folder} does not exist, so it holds no run to continue. Check --out. To start a "
                          "new run there, give --method, --dataset or a configuration file.")  # fmt: skip
    if (folder / RESULTS).exists() and not (args.resume or args.overwrite):
        raise ConfigError(f"{folder} already holds a run: continue it with --resume, replace it with --overwrite, "
                          "or choose another folder with --out")  # fmt: skip
    run = run_config(config, folder, resume=args.resume, quiet=args.quiet)
    print(
        f"{config.method.name}: {run.scored}, "
        f"density {run.weights.mask.density:.4f}, up {amount(run.bytes_up)}, down {amount(run.bytes_down)}, "
        f"{run.spent}{run.seconds:.1f} s, checksum {run.checksum}"
        + (f"; stopped early: {run.stopped}" if run.stopped else "")
    )
    print(f"results in {folder}")
    if (folder / "model.safetensors").exists():
        load = "".join(f"--load {file} " for file in args.load)
        print(
            "model.safetensors in this folder comes from an earlier export. To update it, run `flashfl export "
            f"{load}{folder}`"
        )
    return 0 if run.kept else 1  # not if the final model had to go elsewhere


def _compare(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .methods import METHODS
    from .paper.verdict import verdict
    from .report.command import page_for
    from .run.compare import check_settings, compare, settings_for
    from .run.summary import Metric, numbers_of, summarise
    from .run.table import TRANSFER, summary_table

    asked = ",".join(METHODS) if args.methods.strip() == "all" else args.methods
    names = list(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    if not names:
        raise ConfigError("--methods names no method: `flashfl methods` lists them")
    if args.seeds < 1:
        raise ConfigError(f"--seeds {args.seeds}: must be at least 1")
    check_settings(names, overrides)

    def base(name: str, seed: int) -> RunConfig:
        return _config(args, {**settings_for(name, overrides), "method": name, "seed": str(seed)})

    first = [base(name, 0) for name in names]  # every name and setting is checked before anything runs
    runs = compare(base, names, range(args.seeds), args.out, args.quiet, args.overwrite)
    found = {
        name: summarise([numbers_of(r.header, r.rounds) for r in group], Metric.of(group[0].header))
        for name, group in runs.items()
    }
    costs = (TRANSFER, "FLOPs / run", "mask mismatch", "seconds / run")
    print(
        summary_table(found, _COMPARED, _title(first, args.seeds)).terminal(),
        summary_table(found, costs).terminal(),
        sep="\n\n",
    )
    said = (
        "Bytes are those of the encoded messages, first phase included, averaged over rounds. Mbit/s: seconds that the "
        "bytes of one client and round take, up and down together. Mask mismatch: how much the server's mask "
        "differs from that of the round before (0: equal, 1: nothing in common), averaged over the last sixth of the "
        "run."
    )
    print("", *(textwrap.fill(text, 80) for text in (said, verdict(found)) if text), sep="\n")
    print(f"results in {args.out}")
    if page := page_for(args.out, [r.path.parent for group in runs.values() for r in group if r.path]):
        print(f"page: {page}")
    return 0


def _title(configs: Sequence[RunConfig], seeds: int) -> str:
    """What the runs of a comparison have in common."""
    from .run.progress import amount

    train, task = configs[0].train, configs[0].task
    density = {c.to_json()["method"].get("density", 1.0) for c in configs} - {1.0}
    size = f"density {', '.join(map(str, sorted(density))) or '1'}"
    if train.budget:
        size = f"{amount(train.budget)} a client and round each way"
    return (
        f"{task.dataset}: {task.clients} clients, {train.per_round} a round, {train.rounds} rounds, {size}, "
        f"{seeds} seed(s)"
    )


def _export(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .run.export import export_run

    print(export_run(args.run, args.out, args.view, args.format))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
