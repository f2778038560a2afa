"""The module is what all command lines have in common: help in groups, suggestions, and options of a dataclass.

It needs typer and nothing else, and knows none of the commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

OLD_NAMES = re.compile(r", --house(-model)?\b")
"""The former names of options, which go on working and are not shown."""
SIDES = 4
"""The columns of a terminal that help leaves free on both sides of an option."""
JSON = "--json"
"""The option of all commands that have figures to tell. Its value, a file, may be left out."""
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The error of a command line that is not understood. typer has no public name for it."""


def did_you_mean(wrong: Iterable[str], known: Iterable[str], most: int = 3) -> str:
    """Returns the question that suggests known names for the wrong ones; empty where none is like them."""
    names = list(known)
    near = [name for one in wrong for name in get_close_matches(one, names, n=most)]
    return f"did you mean {' or '.join(near)}?" if near else ""


class _Helpful:
    """_Helpful lists a command's options below the headings of their groups, and suggests options and commands for
    mistyped ones.
    """

    def help_rows(self: Any, ctx: Any) -> Iterable[tuple[str, tuple[str, str]]]:
        """Yields a heading for each option, and the two columns of its help."""
        heading = "Options"
        for parameter in self.get_params(ctx):
            if (row := parameter.get_help_record(ctx)) is not None:
                heading = "Help" if parameter.name == "help" else getattr(parameter, "rich_help_panel", None) or heading
                # typer has the type of an argument behind its name, and choices in brackets
                value = row[0].partition(" <")[0] if parameter.param_type_name == "argument" else row[0]
                value = OLD_NAMES.sub("", value)
                yield heading, (value.replace("<", "").replace(">", ""), row[1])

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for heading, row in self.help_rows(ctx):
            groups.setdefault(heading, []).append(_fitting(row, formatter.width - SIDES))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
        if hasattr(self, "format_commands"):
            self.format_commands(ctx, formatter)

    def get_help_option_names(self, ctx: Any) -> list[str]:
        return ["--help", "-h"]

    def parse_args(self: Any, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]
        except UsageError as error:
            if not hasattr(error, "possibilities"):
                raise
            flags = [flag for one in self.get_params(ctx) for flag in (*one.opts, *one.secondary_opts)]
            raise _unknown("option", error.option_name, flags, ctx) from None  # type: ignore[attr-defined]

    def resolve_command(self: Any, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            raise _unknown("command", args[0], self.list_commands(ctx), ctx)
        return super().resolve_command(ctx, args)  # type: ignore[misc]


def _fitting(row: tuple[str, str], width: int) -> tuple[str, str]:
    """Returns the row with its choices in the text, where they are too many for the line of the option."""
    flag, _, choices = row[0].partition(" ")
    if len(row[0]) <= width or "|" not in choices:
        return row
    text, gap, default = row[1].partition("  [")
    return f"{flag} NAME", f"{text}: {choices.replace('|', ', ')}{gap}{default}"


def _unknown(what: str, name: str, known: Iterable[str], ctx: Any) -> Exception:
    meant = did_you_mean([name], known)
    return UsageError(f"There is no {what} {name}{meant and f' ({meant})'}.", ctx)


def _with_stdout(args: list[str]) -> list[str]:
    """Returns the words with a ``-`` behind a ``--json`` that has no file of its own."""
    at = args.index(JSON) if JSON in args else len(args)
    if at == len(args) or "--" in args[:at]:
        return args
    behind = args[at + 1] if at + 1 < len(args) else "--"
    is_bare = behind.startswith("-") and behind != "-"
    return [*args[: at + 1], *(["-"] if is_bare else []), *args[at + 1 :]]


class Command(_Helpful, TyperCommand):
    """Command is one command, with grouped help and suggestions."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_stdout(args))


class Group(_Helpful, TyperGroup):
    """Group has several commands, with grouped help and suggestions."""


class Untouched(Command):
    """Untouched is a command whose arguments are read by a command line of its own, ``--`` and ``--help`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return args


class SettingsCommand(Untouched):
    """SettingsCommand is a command whose options are the fields of settings, which read the arguments themselves."""

    def settings_rows(self) -> Iterable[tuple[str, tuple[str, str]]]:
        """Yields the rows of the settings' help. They are asked for only where help is: settings are slow to import."""
        raise NotImplementedError

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if {"-h", "--help"} & set(args):
            typer.echo(ctx.get_help())
            raise typer.Exit
        return super().parse_args(ctx, args)

    def help_rows(self, ctx: Any) -> Iterator[tuple[str, tuple[str, str]]]:
        yield from self.settings_rows()
        yield from super().help_rows(ctx)


def exit_status(app: typer.Typer, program: str, words: Iterable[str] | None = None) -> int:
    """Runs a command line, that of this process by default, and returns its exit status. A text in place of that is
    printed, as Python does with it."""
    try:
        app(None if words is None else list(words), prog_name=program)
    except SystemExit as end:
        if isinstance(end.code, str):
            typer.echo(end.code, err=True)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@contextmanager
def one_line_errors(program: str, *errors: type[Exception]) -> Iterator[None]:
    """Prints an error that a user can put right in one line on stderr, and exits with status 2."""
    try:
        yield
    except errors as error:
        typer.echo(f"{program}: {error}", err=True)
        raise typer.Exit(2) from None


def takes(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options that dataclasses declare on their fields by `option`; the command gets one object of
    each class, under the name that it has here.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        declared = {name: _parameters(options) for name, options in groups.items()}
        own = signature(command, eval_str=True).parameters
        parts = [declared.get(name, [parameter]) for name, parameter in own.items()]
        parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for part in parts for one in part]

        @wraps(command)
        def run(**given: Any) -> None:
            for name, options in groups.items():
                values = {one.name: given.pop(one.name) for one in declared[name]}
                given[name] = options(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
            command(**given)

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        del run.__wrapped__
        return run

    return decorate


def _parameters(options: type) -> list[Parameter]:
    """Returns a parameter for each field that has an option, the inherited ones last. A tuple is a list on the command
    line.
    """
    found = []
    hints = get_type_hints(options, include_extras=True)
    for field in sorted(fields(options), key=lambda one: one.name not in options.__annotations__):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            kind = list[str] if get_origin(hint.__origin__) is tuple else hint.__origin__
            default = [] if kind == list[str] else field.default
            hint = Annotated[kind, *hint.__metadata__]
            found.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return found
