"""The tables in docs/ agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pyhvd
from pyhvd import config, elastic, errors, simulation, testing
from pyhvd.config import SHARED, Config, suffix_of
from pyhvd.job import spec
from pyhvd.run import cli
from pyhvd.run.hosts.clusters import slurm, small

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
REFERENCE = (ROOT / "docs" / "api.md").read_text()
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
FROM_HOROVOD = (ROOT / "docs" / "from_horovod.md").read_text()
RUN = (ROOT / "docs" / "run.md").read_text()
MANY_HOSTS = (ROOT / "docs" / "many_hosts.md").read_text()
FAQ = (ROOT / "docs" / "faq.md").read_text()


def _rows(text: str, first_cell: str) -> list[list[str]]:
    """Return the rows of the tables in `text` whose first cell matches, without code marks."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.M)
    ]
    return [[c.strip("`") for c in row] for row in rows if re.fullmatch(first_cell, row[0])]


def test_every_knob_has_its_row() -> None:
    expected = [
        [
            f"PYHVD_{suffix_of(knob)}",
            str(knob.default),
            knob.metadata["doc"],
            "rank 0" if knob.name in SHARED else "each rank",
        ]
        for knob in Config.knobs()
    ]
    assert _rows(CONFIGURATION, "`PYHVD_.*") == expected


def test_knobs_without_effect_are_listed() -> None:
    listed = re.findall(r"^- `PYHVD_(\w+)`$", CONFIGURATION, re.M)
    assert listed == list(config.WITHOUT_EFFECT)


def test_what_launchers_read_is_the_options() -> None:
    rows = _rows(CONFIGURATION, ".*timeout`.*")
    expected = (spec.START_TIMEOUT, spec.ELASTIC_TIMEOUT, spec.SPARK_START_TIMEOUT)
    assert [row[1:] for row in rows] == [[f"PYHVD_{each.suffix}", f"{each.default:g}"] for each in expected]
    for row, each in zip(rows, expected, strict=True):
        assert each.flag in row[0]
        assert each.argument in row[0]


def test_every_error_has_its_row() -> None:
    """Left out are errors that end no collective, or that reach no program."""
    documented = {row[0]: row[1] for row in _rows(FROM_HOROVOD, r"`\w+Error`")}
    raised = {
        name: error
        for name, error in vars(errors).items()
        if isinstance(error, type)
        and issubclass(error, Exception)
        and name not in {"HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError"}
        and name != "WithdrawnError"
    }
    assert documented.keys() == raised.keys()
    for name, also in documented.items():
        bases = [base.__name__ for base in raised[name].__bases__]
        assert re.findall(r"\w+", also) == bases, name


def test_names_said_to_exist_do() -> None:
    text = FROM_HOROVOD.split("## The same\n")[1].split("\n## ")[0]
    names = re.findall(r"`([A-Za-z]\w+(?:\.\w+)?)`", text)
    assert len(names) > 40
    parameters = {"prescale_factor", "postscale_factor"}
    missing = [n for n in names if n.split(".")[0] not in pyhvd.__all__ and n not in parameters]
    assert missing == []


def test_every_public_name_is_in_the_reference() -> None:
    """A name in the reference that does not exist fails the build of the site."""
    listed: dict[str, list[str]] = {}
    for module, block in re.findall(r"^\.\. currentmodule:: (\S+)\n(.*?)^```$", REFERENCE, re.M | re.S):
        names = re.findall(r"^\.\. (?:auto\w+|data):: (\w+)", block, re.M)
        listed.setdefault(module, []).extend(names)
    for module in (pyhvd, elastic, testing, simulation):
        assert sorted(listed[module.__name__]) == sorted(module.__all__)


def test_every_term_has_one_short_definition() -> None:
    terms = [row for row in _rows(GLOSSARY, r"[\w -]+") if row[0] != "term" and not row[0].startswith("-")]
    assert len(terms) > 100
    names = [term for term, _ in terms]
    assert sorted(set(names)) == sorted(names)
    assert [term for term, meaning in terms if len(meaning.split()) > 25] == []


def test_every_flag_that_chooses_hosts_has_its_row() -> None:
    rows = [row[0] for row in _rows(RUN, "`-.*")]
    (hosts,) = (group for group in cli._parser()._action_groups if group.title == "hosts")
    for action in hosts._group_actions:
        flags = "`, `".join(action.option_strings)
        takes = f'"{action.metavar}"' if action.metavar == "COMMAND" else action.metavar
        assert (flags if takes is None else f"{flags} {takes}") in rows


def test_the_states_of_a_cached_call_are_those_of_the_code() -> None:
    header = (ROOT / "pyhvd" / "native" / "src" / "fast_path" / "progress.h").read_text()
    table = header[header.index(" *   from ") :].split("\n *\n")[0].replace(" *   ", "")
    assert table.count("\n") > 9
    assert f"```text\n{table}\n```" in (ROOT / "docs" / "internals.md").read_text()


def test_agents_of_clusters_are_the_codes() -> None:
    for agent in (small.KUBERNETES_AGENT, small.LSF_AGENT, slurm.AGENT):
        assert f"`{agent}`" in MANY_HOSTS


def test_symptoms_quote_what_pyhvd_says() -> None:
    """Dots stand for what an error's text has in its place."""
    code = "".join(path.read_text() for path in (ROOT / "pyhvd").rglob("*.py"))
    said = re.sub(r'"\n\s*f?"', "", code)
    symptoms = [row.split("|")[1] for row in re.findall(r"^\| .*`.*$", FAQ, re.M)]
    quoted = [text for symptom in symptoms for text in re.findall(r"`([^`]* [^`]*)`", symptom)]
    assert len(quoted) > 8
    theirs = {"cannot load MPI library"}  # mpi4py's
    pieces = {piece.strip() for text in quoted if text not in theirs for piece in text.split("...")}
    assert {piece for piece in pieces if piece not in said} == set()
