"""The commands `methods` and `settings`: what can be set, with defaults and meanings."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Callable

DIGITS_DENSITY = 0.02  # of runs of the embedded digits, which need no configuration file


def add_listings(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the commands to a command line. Returns `methods`, which shares options with others."""
    methods = add("methods", _methods, "list every method with its settings and defaults, or describe one method")
    methods.add_argument("name", nargs="?", default="", metavar="NAME", help="describe this method only")
    add("settings", _settings, "list every setting of training and tasks with its default")
    return methods


def _methods(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    if args.name:
        _describe(args.name, "".join(f" --load {file}" for file in args.load))
    else:
        _list()
    return 0


def _list() -> None:
    from ..core.method import Method
    from ..methods import METHODS
    from ..sparsity import PruneRegrow

    for name, cls in METHODS.items():
        said = [cls.__doc__ or ""]
        # What a method inherits is explained by its parent, below the first paragraph.
        parents = [base for base in cls.__mro__[1:] if issubclass(base, Method) and base is not Method]
        said += [(base.__dict__.get("__doc__") or "").partition("\n\n")[2] for base in parents]
        text = "\n\n".join(inspect.cleandoc(each).strip() for each in said if each.strip())
        print(f"{name}\n" + textwrap.indent(text, "  "))
        _print_options(cls, explained=False)  # the text above does it
    rule = (PruneRegrow.__doc__ or "").partition("\n\n")[2]
    print("--adapt.NAME\n" + textwrap.indent(inspect.cleandoc(rule), "  "))
    print("\n`flashfl methods NAME` describes one method, what its settings mean, and how to run it.")


def _describe(name: str, load: str) -> None:
    """One method: its description, its settings with defaults and meanings, and a command that runs it."""
    from .config import known_method
    from .options import about, options_of

    cls = known_method(name)
    print(f"{name}\n{textwrap.indent(about(cls), '  ')}\n\n  Settings, with defaults:")
    words = [f"flashfl run{load} --method {name}"]
    for option, (kind, default, said) in options_of(cls).items():
        flag = f"--{option.replace('_', '-')}"
        if default == "required" or option == "density":
            words.append(f"{flag} {'VALUE' if default == 'required' else default}")
        digits = f"; {DIGITS_DENSITY} without a configuration file" if option == "density" else ""
        print(f"    {flag} {default if default != '' else repr('')}{digits}  ({kind})")
        print(textwrap.fill(said, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)) if said else None
    if cls.recipe:
        recipe = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in cls.recipe.items())
        print(f"\n  Unless you set them yourself, its runs have:\n    {recipe}")
    print(f"\n  Example:\n    {' '.join(words)}")


def _settings(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from ..data.tasks import TaskConfig
    from .config import TrainConfig

    for title, cls in (("training", TrainConfig), ("task", TaskConfig)):
        print(title)
        _print_options(cls)
    return 0


def _print_options(cls: type, explained: bool = True) -> None:
    from .options import options_of

    for option, (kind, default, said) in options_of(cls).items():
        print(
            f"    --{option.replace('_', '-'):<20} {default!s:<20} {kind}"
            + (f"  ({said})" if said and explained else "")
        )
    print()
