"""Flags and config-file entries, each of which sets an environment variable of the ranks.

Owns the config file (YAML, read with PyYAML). :mod:`pyhvd.config` has the knobs with their entries, and
checks the values.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pyhvd.common.text import describe_import_error
from pyhvd.config import WITHOUT_EFFECT, Config, ConfigEntry, suffix_of
from pyhvd.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """One variable, with its flag and its config-file entry.

    Attributes
    ----------
    variable : str
        The variable of the ranks.
    entry : ConfigEntry
        The entry.
    knob : dataclasses.Field or None
        The knob; None for a variable without effect.
    """

    variable: str
    entry: ConfigEntry
    knob: dataclasses.Field[Any] | None = None

    @property
    def flag(self) -> str:
        """The flag, named as the entry, without some sections and ``enabled``; empty for ``controller``."""
        if "." not in self.entry.name:
            return ""
        name = self.entry.name.removeprefix("params.").removeprefix("library_options.")
        name = name.removesuffix(".enabled").replace("logging.", "log.")
        return "--" + name.replace(".", "-").replace("_", "-")

    @property
    def help(self) -> str:
        """The text in ``--help``, with the default."""
        if self.knob is None:
            return argparse.SUPPRESS
        default = self.knob.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        elif isinstance(default, int | float):
            default = f"{default / self.entry.scale:g}"
        doc = f"with --no-: {self.knob.metadata['doc']}" if self.entry.opposite else self.knob.metadata["doc"]
        return f"{doc} (default: {self.variable}{f', or {default}' if default else ''})"

    def convert(self, value: Any) -> str:
        """Return the variable's text for a value of the file, or a flag's text; raise ValueError if wrong."""
        if not self.entry.takes:
            if not isinstance(value, bool):
                raise ValueError("expected true or false")
            return str(int(value != self.entry.opposite))
        if self.knob is None:
            return str(value)
        if isinstance(self.knob.default, str):
            if not isinstance(value, str):
                raise ValueError("expected text")
        elif isinstance(value, bool):
            raise ValueError("expected a number")
        elif self.entry.scale != 1:
            value = _scaled(value, self.entry.scale)
        elif isinstance(value, float) and value.is_integer():
            value = int(value)
        self.knob.metadata["parse"](str(value))
        return str(value)


def _scaled(value: Any, scale: int) -> int:
    try:
        return round(float(value) * scale)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("expected a number") from None


SETTINGS = (
    *(
        Setting(f"PYHVD_{suffix_of(knob)}", knob.metadata["entry"], knob)
        for knob in Config.knobs()
        if knob.metadata["entry"] is not None
    ),
    *(Setting(f"PYHVD_{suffix}", entry) for suffix, entry in WITHOUT_EFFECT.items() if entry is not None),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the table, and ``--config-file``, to a parser."""
    group = parser.add_argument_group("settings: each is a variable too; a flag overrides the config file")
    group.add_argument("--config-file", metavar="FILE", help="read settings from a YAML file")
    for setting in SETTINGS:
        if setting.flag:
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            if setting.entry.takes:
                how = {"type": checked(setting.convert), "metavar": setting.entry.takes}
            group.add_argument(setting.flag, dest=setting.variable, help=setting.help, **how)


def settings_of(known: argparse.Namespace, tell: Callable[[str], object]) -> dict[str, str]:
    """Return the variables that the flags and the config file set; tell unknown entries of the file.

    Raises
    ------
    ConfigError
        The file cannot be read, or an entry has a wrong value.
    """
    asked = {} if known.config_file is None else read_config_file(known.config_file, tell)
    for setting in SETTINGS:
        value = getattr(known, setting.variable, None)
        if value is not None:
            asked[setting.variable] = value if setting.entry.takes else setting.convert(value)
    return asked


def read_config_file(path: str, tell: Callable[[str], object]) -> dict[str, str]:
    """Return the variables that a config file sets; raise ConfigError if it is invalid.

    Unknown entries have no effect, as in Horovod: `tell` gets a text for each.
    """
    try:
        import yaml
    except ImportError as exc:
        raise ConfigError(
            f"--config-file needs {describe_import_error(exc, 'PyYAML', 'cli', 'yaml')}"
        ) from None
    try:
        with open(path, encoding="utf-8") as file:
            sections = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"--config-file: cannot read {path}: {exc}") from None
    table = {setting.entry.name: setting for setting in SETTINGS}
    asked = {}
    for entry, value in _entries(path, sections, table):
        if entry not in table:
            tell(f"{path}: {entry} has no effect: expected {_describe_entries(entry)}")
            continue
        try:
            asked[table[entry].variable] = table[entry].convert(value)
        except ValueError as exc:
            raise ConfigError(f"{path}: {entry}: {value!r}: {exc}") from None
    return asked


def _describe_entries(entry: str) -> str:
    """Return the entries of an unknown entry's section; the sections, if that is unknown too."""
    entries = [setting.entry.name for setting in SETTINGS]
    section = entry.partition(".")[0] + "."
    beside = sorted(each for each in entries if each.startswith(section))
    sections = sorted({each.partition(".")[0] for each in entries if "." in each})
    return ", ".join(beside) or f"a section of {', '.join(sections)}, or controller"


def _entries(path: str, sections: Any, known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a config file, whose sections may be empty."""
    if not isinstance(sections, dict):
        raise ConfigError(f"{path}: expected sections with entries")
    for section, entries in sections.items():
        if section in known:
            yield section, entries
        elif isinstance(entries, dict):
            yield from ((f"{section}.{key}", value) for key, value in entries.items())
        elif section not in {each.partition(".")[0] for each in known}:
            yield section, entries
        elif entries is not None:
            raise ConfigError(f"{path}: expected sections with entries, not {section}: {entries!r}")


def checked(convert: Callable[[str], T]) -> Callable[[str], T]:
    """Return a conversion for argparse, whose error has the text of a ValueError, and what was given."""

    def check(text: str) -> T:
        try:
            return convert(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{exc}, not {text!r}") from None

    return check
