"""The command line: `flashfl run | compare | reproduce | data | report | figure | watch | export | ...`."""

from __future__ import annotations

import argparse
import io
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .core.errors import ConfigError, FlashError
from .report.command import add_commands, page_for
from .run.datacli import add_data

_DEMO_METHODS = "dense,nst,pdst,spdst,jmwst"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, dispatch, and turn errors the user can mend into one clear line."""
    parser, commands = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what an encoding cannot say must not end what has been computed
            stream.reconfigure(errors="replace")
    try:
        overrides: dict[str, str] = {}
        if words and words[0] in commands:
            words, overrides = _settings_apart(words, commands[words[0]])
        args = parser.parse_args(words)
        if not hasattr(args, "go"):
            parser.print_help()
            return 2
        if getattr(args, "load", None):
            from .run.loaded import load_file

            load_file(args.load)
        return int(args.go(args, overrides) or 0)
    except FlashError as error:
        print(f"flashfl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = {
            "run": "; if a round had ended, --resume goes on from there",
            "compare": "; the same command goes on from here",
            "reproduce": "; the same command goes on from here",
        }
        print(f"\nflashfl: interrupted{again.get(words[0] if words else '', '')}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"flashfl: {error}", file=sys.stderr)
        return 1


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _settings_apart(words: list[str], command: argparse.ArgumentParser) -> tuple[list[str], dict[str, str]]:
    """Split `--name value` and `--name=value` settings from the options a command has of its own."""
    own, settings = [], {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name in command._option_string_actions or not command.get_default("settings"):
            own.append(word)
            continue
        if not equals:
            value = next(rest, "")
            if value == "" or value.startswith("--"):
                raise ConfigError(f"{name} needs a value: {name} VALUE")
        settings[name[2:].replace("-", "_")] = value
    return own, settings


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="flashfl",
        description="Sparse federated learning that is real: FLASH and its rivals, with bytes that are really saved.",
        epilog="Any setting can be given as --name value, for instance --density 0.05 --rounds 100 --alpha 0.1; "
        "`flashfl methods` lists those of the methods, `flashfl settings` all others.",
    )
    parser.add_argument("--version", action="version", version=f"flashfl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    made: dict[str, argparse.ArgumentParser] = {}

    def add(name: str, go: Callable[..., Any], help: str, settings: bool = False) -> argparse.ArgumentParser:
        epilog = "Any setting can be given as --name value; see `flashfl methods` and `flashfl settings`."
        sub = commands.add_parser(
            name, help=help, description=help, allow_abbrev=False, epilog=epilog if settings else None
        )
        sub.set_defaults(go=go, settings=settings)
        made[name] = sub
        return sub

    said = "train one method, from a TOML configuration or on the embedded digits (there at density 0.02 unless given)"
    run = add("run", _run, said, settings=True)
    run.add_argument("config", nargs="?", type=Path, help="a TOML file with tables task, train, method")
    run.add_argument("--out", type=Path, help="folder for results and checkpoints (default: runs/TASK-METHOD-SEED)")
    run.add_argument("--resume", action="store_true", help="go on from the last checkpoint in that folder")
    run.add_argument("--overwrite", action="store_true", help="start anew even if the folder holds a run")
    run.add_argument("--quick", action="store_true", help="shrink everything to a smoke run of about a minute")
    run.add_argument("--data-root", dest="root", help="where data sets lie (default: FLASHFL_DATA, else ./data)")
    run.add_argument("--quiet", action="store_true", help="show the final line only")

    comparison = add("compare", _compare, "train several methods over several seeds and print a table", settings=True)
    comparison.add_argument("config", nargs="?", type=Path, help="a TOML file (default: the embedded digits)")
    comparison.add_argument("--methods", default=_DEMO_METHODS, help=f"comma-separated (default: {_DEMO_METHODS})")
    comparison.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    comparison.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder (default: runs/compare)")
    comparison.add_argument(
        "--overwrite", action="store_true", help="replace runs of other settings or code in that folder"
    )
    comparison.add_argument("--quick", action="store_true", help="shrink everything to a smoke run")
    comparison.add_argument("--data-root", dest="root", help="where data sets lie")
    comparison.add_argument("--quiet", action="store_true", help="show the table only")

    again = add("reproduce", _reproduce, "run the missing cells of a table of the paper, and show ours beside theirs")
    again.add_argument("table", help="main, savings, hetero, r_int, stage1, initialisation, nm, static_bn or wfa")
    for name in ("dataset", "alpha", "density", "method"):
        again.add_argument(f"--{name}", default="", help="only these cells (comma-separated)")
    again.add_argument("--seeds", type=int, help="seeds a cell (default: 1 to run, all there are to show)")
    again.add_argument("--budget-minutes", type=float, default=0.0, help="how long to run; 0 (default): only show")
    again.add_argument("--results", type=Path, default=Path("results"), help="where results lie (default: results)")
    again.add_argument("--runs", type=Path, default=Path("runs/reproduce"), help="where cells are run")
    again.add_argument("--data-root", dest="root", default="", help="where data sets lie (default: FLASHFL_DATA)")
    again.add_argument("--device", default="auto", help="auto, cpu or cuda")
    said = "also write the table there (.md, .html), or a plot of accuracy against bytes (.png, .svg, .pdf)"
    again.add_argument("--out", type=Path, help=said)

    export = add("export", _export, "write a run's final model as safetensors, with its masks in a file beside it")
    export.add_argument("run", type=Path, help="the folder of a run")
    export.add_argument("--to", type=Path, help="the file to write (default: RUN/model[-VIEW].safetensors)")
    export.add_argument("--view", default="", help="another model than the reported one: 'density 0.1' of several, say")

    add_data(add)
    add_commands(add)
    for command in (run, comparison):
        command.add_argument("--central", action="store_true", help="one client holding all data; a round is an epoch")
    methods = add("methods", _methods, "list every method with its settings and defaults")
    for command in (run, comparison, export, methods):
        said = "a Python file to import first, which registers methods of your own: flashfl.METHODS[NAME] = CLASS"
        command.add_argument("--load", type=Path, metavar="FILE.py", help=said)
    add("settings", _settings, "list every setting of training and tasks with its default")
    return parser, made


def _config(args: argparse.Namespace, overrides: dict[str, str]) -> Any:
    from .run.config import load_toml, make_config
    from .run.quick import quick

    data = load_toml(args.config) if args.config else {}
    if args.root:
        overrides = {**overrides, "data_root": args.root}
    if args.central:
        alone = {"clients": "1", "per_round": "1", "partition": "iid"}
        if taken := sorted({name.rpartition(".")[2] for name in overrides} & alone.keys()):
            raise ConfigError(f"--central leaves no choice of {', '.join(taken)}: one client holds all data")
        overrides = {**overrides, **alone}
    names = {name.rpartition(".")[2]: value for name, value in overrides.items()}
    if args.config is None and "density" not in names and names.get("dataset", "digits") == "digits":
        # The embedded task is small: at 2 % the methods differ visibly, at 5 % hardly (see LOG.md).
        data = {**data, "method": {"density": 0.02}}
    return quick(data, overrides) if args.quick else make_config(data, overrides)


def _run(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .run.compare import run_config
    from .run.lock import alone
    from .run.progress import amount
    from .run.results import RESULTS

    config = _config(args, overrides)
    dataset = re.sub(r"[^\w.]+", "-", config.task.dataset).strip("-.")  # folder:PATH is no place for results
    folder = args.out or Path("runs") / f"{dataset}-{config.method.name}-seed{config.train.seed}"
    with alone(folder if folder.is_dir() else None):
        if (folder / RESULTS).exists() and not (args.resume or args.overwrite):
            raise ConfigError(f"{folder} already holds a run: continue it with --resume, replace it with --overwrite, "
                              "or choose another folder with --out")  # fmt: skip
        fresh = args.overwrite and not args.resume
        result = run_config(
            config, folder, resume=args.resume, quiet=args.quiet, ready=(lambda: _clear(folder)) if fresh else None
        )
    end, run = result["end"], result["run"]
    print(
        f"{config.method.name}: accuracy {100 * end['accuracy']:.2f} % (best {100 * end['best']:.2f} %), "
        f"density {run.weights.mask.density:.4f}, up {amount(end['bytes']['up'])}, "
        f"down {amount(end['bytes']['down'])}, {end['seconds']:.1f} s, checksum {end['checksum']}"
        + (f"; stopped early: {run.stopped}" if run.stopped else "")
    )
    print(f"results in {folder}")
    return 0


def _clear(folder: Path) -> None:
    """Remove what a run writes, and nothing else; its results are set aside once the new run begins."""
    for name in ("checkpoints", "masks", "snapshots", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("model.safetensors", "model.masks.safetensors"):
        (folder / name).unlink(missing_ok=True)


def _compare(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from .run.compare import COLUMNS, compare, replace_seed, rows, verdict

    names = list(dict.fromkeys(name.strip() for name in args.methods.split(",") if name.strip()))
    if not names:
        raise ConfigError("--methods names no method: `flashfl methods` lists them")
    if args.seeds < 1:
        raise ConfigError(f"--seeds {args.seeds}: must be at least 1")
    for name, instead in (("seed", "--seeds N takes the seeds 0 to N-1"), ("method", "--methods names the methods")):
        if name in overrides or f"train.{name}" in overrides:
            raise ConfigError(f"--{name} does not go with a comparison: {instead}")
    _known_to_some(names, overrides)

    def base(name: str, seed: int) -> Any:
        return replace_seed(_config(args, {**_only_known(name, overrides), "method": name}), seed)

    first = [base(name, 0) for name in names]  # every name and setting is checked before anything runs
    runs = compare(base, names, range(args.seeds), args.out, args.quiet, args.overwrite)
    train, task = first[0].train, first[0].task
    density = {getattr(c.method, "density", 1.0) for c in first} - {1.0}
    table = Table(
        *COLUMNS,
        title=f"{task.dataset}: {task.clients} clients, {train.per_round} a round, {train.rounds} rounds, "
        f"target density {', '.join(map(str, sorted(density))) or '1'}, {args.seeds} seed(s)",
    )
    for row in rows(runs):
        table.add_row(*row)
    for column in table.columns:
        column.no_wrap = True
    # A terminal that is too narrow wraps the lines; cut to its width they would lose digits.
    console = Console(width=max(110, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 120)
    console.print(table)
    print("Bytes are those of the encoded messages, stage 1 included, averaged over rounds. Mask mismatch: between the "
          "server's masks of consecutive rounds, over the last sixth of the run.")  # fmt: skip
    if text := verdict(runs):
        print(text)
    print(f"results in {args.out}")
    if page := page_for(args.out, [run["folder"] for group in runs.values() for run in group]):
        print(f"page: {page}")
    return 0


def _only_known(method: str, overrides: dict[str, str]) -> dict[str, str]:
    """In a comparison a setting reaches the methods that have it; dense FedAvg has no density."""
    from .methods import METHODS

    if method not in METHODS:
        return overrides
    every, own = _options(list(METHODS)), _options([method])
    return {k: v for k, v in overrides.items() if k in own or k not in every}


def _known_to_some(methods: Sequence[str], overrides: dict[str, str]) -> None:
    """A method's setting that none of the methods compared has is a mistake."""
    from .methods import METHODS

    here = [name for name in methods if name in METHODS]
    for name in overrides:
        if here and name in _options(list(METHODS)) - _options(here):
            raise ConfigError(f"--{name.replace('_', '-')}: none of {', '.join(here)} has such a setting")


def _options(methods: Sequence[str]) -> set[str]:
    """What settings of these methods may be called on the command line: by short and by full name."""
    from .methods import METHODS
    from .run.config import options_of

    short = {name for method in methods for name in options_of(METHODS[method])}
    return short | {f"method.{name}" for name in short}


def _reproduce(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .core.files import put
    from .run.cells import chosen, load_table
    from .run.reproduce import markdown, page, panels, reproduce

    if args.seeds is not None and args.seeds < 1:
        raise ConfigError(f"--seeds {args.seeds}: must be at least 1")
    plot, text_too = (".png", ".svg", ".pdf"), (".md", ".html")
    if args.out and args.out.suffix not in plot + text_too:
        raise ConfigError(f"--out {args.out}: must end in one of {', '.join(text_too + plot)}")
    _, _, cells = load_table(args.table)
    cells = chosen(cells, args.dataset, args.alpha, args.density, args.method)
    if not args.budget_minutes >= 0:  # nor a number that is none
        raise ConfigError(f"--budget-minutes {args.budget_minutes:g}: must be 0 (only show) or more")
    if not args.budget_minutes and not args.results.is_dir():
        raise ConfigError(f"there is no folder {args.results}: --results says where they lie (the checkout has some)")
    failed = 0
    if args.budget_minutes > 0:
        settings = {"device": args.device, "data_root": args.root}
        _, failed = reproduce(cells, args.seeds or 1, args.results, args.runs, args.budget_minutes, settings)
    text = markdown(args.table, cells, args.seeds, args.results)
    print(text)
    if args.out and args.out.suffix in plot:
        from .report.figures import accuracy_bytes_of_cells, save

        shown = panels(cells, args.seeds, args.results)
        if not shown:
            raise ConfigError(f"--out {args.out}: none of these cells has been run, so there is nothing to draw")
        print(save(accuracy_bytes_of_cells(shown), args.out), file=sys.stderr)
    elif args.out:
        html = args.out.suffix == ".html"
        put(args.out, (page(args.table, cells, args.seeds, args.results) if html else text).encode())
    return 1 if failed else 0


def _export(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .run.export import export_run

    print(export_run(args.run, args.to, args.view))
    return 0


def _methods(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    import inspect

    from .core.method import Method
    from .methods import METHODS
    from .sparsity import PruneRegrow

    for name, cls in METHODS.items():
        said = [cls.__doc__ or ""]
        # What a method takes over from another is explained there, below the first paragraph.
        parents = [base for base in cls.__mro__[1:] if issubclass(base, Method) and base is not Method]
        said += [(base.__dict__.get("__doc__") or "").partition("\n\n")[2] for base in parents]
        text = "\n\n".join(inspect.cleandoc(each).strip() for each in said if each.strip())
        print(f"{name}\n" + "\n".join(f"  {line}".rstrip() for line in text.splitlines()))
        _print_options(cls)
    rule = (PruneRegrow.__doc__ or "").partition("\n\n")[2]
    print("--adapt.NAME\n" + "\n".join(f"  {line}".rstrip() for line in inspect.cleandoc(rule).splitlines()))
    return 0


def _settings(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .data.tasks import TaskConfig
    from .run.config import TrainConfig

    for title, cls in (("training", TrainConfig), ("task", TaskConfig)):
        print(title)
        _print_options(cls)
    return 0


def _print_options(cls: type) -> None:
    from .run.config import options_of

    for option, (kind, default, said) in options_of(cls).items():
        print(f"    --{option.replace('_', '-'):<20} {default!s:<20} {kind}" + (f"  ({said})" if said else ""))
    print()


if __name__ == "__main__":
    raise SystemExit(main())
