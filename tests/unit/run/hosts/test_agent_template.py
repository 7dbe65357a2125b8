"""The template of the command that starts an agent."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, strategies as st

from pyhvd.run.hosts.agent_template import SSH, agent_command, check_agent, explain, ssh_command
from pyhvd.run.hosts.clusters import slurm, small

COMMAND = "exec '/opt/my python' -P -m pyhvd.job.agent.agent"


@pytest.mark.parametrize(
    "template", [SSH, small.FLUX_AGENT, small.KUBERNETES_AGENT, small.LSF_AGENT, slurm.AGENT]
)
def test_the_commands_of_clusters_are_templates(template: str) -> None:
    assert check_agent(template) == template
    words = agent_command(template, "h1", COMMAND)
    assert words.count("h1") == 1
    assert words[-1] == COMMAND


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("ssh -p 22 {host} {command}", ["ssh", "-p", "22", "h1", "a b"]),
        ("run --on={host} 'sh -c' \"{command}\"", ["run", "--on=h1", "sh -c", "a b"]),
        ("x {host} {host} {other} {} {command}", ["x", "h1", "h1", "{other}", "{}", "a b"]),
    ],
)
def test_a_template_is_split_before_it_is_filled(template: str, words: list[str]) -> None:
    assert agent_command(check_agent(template), "h1", "a b") == words


@given(st.text(), st.text())
def test_what_is_put_in_stays_one_word(host: str, command: str) -> None:
    assert agent_command("ssh {host} -- x{command}", host, command) == ["ssh", host, "--", f"x{command}"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("ssh {command}", "{host} is missing in 'ssh {command}': give e.g. 'ssh {host} {command}'"),
        ("ssh {host}", "{command} is missing in 'ssh {host}': give e.g. 'ssh {host} {command}'"),
        ("", "{host} is missing in '': give e.g. 'ssh {host} {command}'"),
        ("ssh '{host} {command}", 'No closing quotation: "ssh \'{host} {command}"'),
    ],
)
def test_malformed_templates(template: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_agent(template)
    assert str(caught.value) == message


def test_the_flux_command_is_one_for_a_shell() -> None:
    shell, flag, script, host, command = agent_command(small.FLUX_AGENT, "h1", COMMAND)
    assert (shell, flag, host, command) == ("sh", "-c", "h1", COMMAND)
    assert shlex.split(script)[:4] == ["exec", "flux", "exec", "-r"]


def test_the_port_and_the_key_of_ssh() -> None:
    words = agent_command(ssh_command(2222, "/my key"), "user@h1", COMMAND)
    assert words[-6:] == ["-p", "2222", "-i", "/my key", "user@h1", COMMAND]
    assert ssh_command() == SSH


@pytest.mark.parametrize(
    ("code", "said", "text", "may_pass"),
    [
        (255, "ssh: connect to host h1 port 22: Connection refused", "Is the host up", True),
        (255, "ssh: Could not resolve hostname h1: Name or service not known", "Is the host up", True),
        (255, "ssh: connect to host h1 port 22: Connection timed out", "Is the host up", True),
        (255, "kex_exchange_identification: read: Connection reset by peer", "Is the host up", True),
        (255, "root@h1: Permission denied (publickey).", "ssh-copy-id", False),
        (255, "Host key verification failed.", "Run 'ssh h1' once", False),
        (127, "sh: 1: exec: /py: not found", "--python", False),
        (1, "/usr/bin/python3: No module named pyhvd", "install pyhvd", False),
        (1, "", "the agent did not start: exit code 1, and no word", False),
    ],
)
def test_a_failed_command_has_a_remedy(code: int, said: str, text: str, may_pass: bool) -> None:
    line, again = explain("h1", code, f"Welcome to h1\n\n{said}\n" if said else "")
    assert text in line
    assert "\n" not in line
    assert again is may_pass
