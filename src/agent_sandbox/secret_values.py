"""The values of secrets, read on behalf of the caller: from variables, files, programs and the keyring, never from the project.

What lies in the project may be written by an agent, and what it names would then go where the agent wants.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.bound_secrets import AWS_KEY, AWS_NAMES, AWS_SECRET, AWS_TOKEN, BoundSecret, Secret, new_placeholder
from agent_sandbox.policy.paths import contains
from agent_sandbox.policy.secrets import names_a_secret

MOST_BYTES = 64 << 10  # of a value
COMMAND_SECONDS = 60.0
MOST_OWN = 64  # variables whose values are sought in what leaves
GIT_SETTINGS = (".gitconfig", ".config/git/config")  # in a home
_LONG, _SHORTEST = 12, 8  # characters of a value that is no word; of one with letters and digits
_KEYRINGS = (("secret-tool", ("lookup", "service", "{service}", "username", "{user}")), ("keyring", ("get", "{service}", "{user}")))


def bound(secrets: Iterable[Secret], environment: Mapping[str, str], *, home: str, project: str | None) -> tuple[BoundSecret, ...]:
    """Return the secrets with their values, each with a placeholder of its own. Raises `PolicyError`, which never holds a value.

    A key of AWS is two or three of them: its id, the secret, and the token of a session.
    """
    found = []
    for each in secrets:
        value = each.value if each.value is not None else _value(each, environment, home, project)
        parts = {each.place: value} if each.place != AWS_SECRET else _aws_parts(each, value, environment)
        for place, part in parts.items():
            name = AWS_NAMES.get(place, each.name)
            found.append(BoundSecret(name, new_placeholder(name, os.urandom(12)), part, tuple(each.hosts), place))
    return tuple(found)


def _aws_parts(secret: Secret, value: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of a key of AWS, by their places.

    A value from a variable is the secret alone. Any other is an object in JSON, as programs print it, or a file with profiles.
    """
    import configparser  # few runs use AWS
    import json

    if secret.value is None and secret.source.partition(":")[0] == "env":
        parts = {AWS_SECRET: value, **{place: environment.get(AWS_NAMES[place], "") for place in (AWS_KEY, AWS_TOKEN)}}
    elif value.lstrip().startswith("{"):
        try:
            said = json.loads(value)
            said = said.get("Credentials", said)
            names = ((AWS_KEY, "AccessKeyId"), (AWS_SECRET, "SecretAccessKey"), (AWS_TOKEN, "SessionToken"))
            parts = {place: str(said.get(name) or "") for place, name in names}
        except (ValueError, AttributeError):
            parts = {}
    else:
        profile = configparser.RawConfigParser(strict=False)
        with suppress(configparser.Error):
            profile.read_string(value)
        parts = {place: profile.get("default", name.lower(), fallback="") for place, name in AWS_NAMES.items()}
    if not (parts.get(AWS_KEY) and parts.get(AWS_SECRET)):
        hint = "set AWS_ACCESS_KEY_ID as well; or name a file with a profile [default], or a command that prints a key in JSON"
        raise PolicyError(f"the secret {secret.name}: there is no whole key of AWS", hint=hint)
    return {place: part for place, part in parts.items() if part}


def own_values(environment: Mapping[str, str], handed: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return names and values of variables that hold secrets, by their names, and values that are no words.

    Values among `handed` are left out: whoever gives a value to a run means it to be used.
    """
    given = frozenset(handed)
    found = ((name, value) for name, value in environment.items() if names_a_secret(name) and value not in given and _is_random(value))
    return tuple(sorted(found)[:MOST_OWN])


def git_names_roots(home: str) -> bool:
    """Return whether a setting of git, of the system or of the user, names root certificates. Loads nothing for that."""
    for path in ("/etc/gitconfig", *(os.path.join(home, each) for each in GIT_SETTINGS)):
        with suppress(OSError), open(path, "rb") as file:
            if b"sslcainfo" in file.read(1 << 20).lower():
                return True
    return False


def _is_random(value: str) -> bool:
    """Return whether a value can be sought without being found everywhere: no path, no word, no number."""
    if value.startswith(("/", "./", "~")) or not value.isascii() or not value.isprintable() or " " in value:
        return False
    mixed = any(each.isdigit() for each in value) and any(each.isalpha() for each in value)
    return len(value) >= (_SHORTEST if mixed else _LONG) and not value.isdigit()


def _value(secret: Secret, environment: Mapping[str, str], home: str, project: str | None) -> str:
    kind, _, rest = secret.source.partition(":")
    if kind == "env":
        if not (value := environment.get(rest or secret.name, "")):
            hint = f"set it, or write {secret.name}=file:PATH@HOST, =command:LINE@HOST or =keyring:SERVICE/USER@HOST"
            raise PolicyError(f"the secret {secret.name}: the variable {rest or secret.name} is not set", hint=hint)
        return value
    if kind == "file":
        return _of_file(secret.name, rest, home, project)
    if kind == "command":
        return _of_command(secret.name, _words(secret.name, rest), environment, home, project)
    service, _, user = rest.rpartition("/")
    for program, words in _KEYRINGS:
        if shutil.which(program, path=environment.get("PATH")):
            line = [program, *(word.format(service=service, user=user) for word in words)]
            return _of_command(secret.name, line, environment, home, project)
    names = " or ".join(program for program, _ in _KEYRINGS)
    raise PolicyError(f"the secret {secret.name}: there is no program that reads the keyring", hint=f"install {names}")


def _of_file(name: str, path: str, home: str, project: str | None) -> str:
    return _text(name, read_outside(f"the secret {name}", path, home=home, project=project, most=MOST_BYTES))


def read_outside(what: str, path: str, *, home: str, project: str | None, most: int) -> bytes:
    """Return the contents of a file that lies outside the project. Raises `PolicyError`."""
    path = os.path.join(home, path[2:]) if path.startswith("~/") else path
    if not os.path.isabs(path):
        raise PolicyError(f"{what}: {path!r} is no absolute path", hint="write it from / or ~/")
    try:
        with open(path, "rb") as file:
            _check_outside(what, f"/proc/self/fd/{file.fileno()}", path, project)
            data = file.read(most + 1)
    except OSError as error:
        raise PolicyError(f"{what}: {path} cannot be read: {error.strerror}", hint="name a file that you can read") from None
    if len(data) > most:
        raise PolicyError(f"{what}: {path} has more than {most} bytes", hint="name a smaller file")
    return data


def _of_command(name: str, words: list[str], environment: Mapping[str, str], home: str, project: str | None) -> str:
    program = shutil.which(words[0], path=environment.get("PATH"))
    if program is None:
        raise PolicyError(f"the secret {name}: there is no program {words[0]!r}", hint="write its path, or install it")
    _check_outside(f"the secret {name}", program, program, project)
    try:
        done = subprocess.run(
            [program, *words[1:]], stdout=subprocess.PIPE, timeout=COMMAND_SECONDS, check=False, cwd=home, env=dict(environment)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PolicyError(f"the secret {name}: {words[0]} did not end well: {type(error).__name__}", hint="run it by hand") from None
    if done.returncode:
        raise PolicyError(f"the secret {name}: {words[0]} exited with {done.returncode}", hint="run it by hand")
    return _text(name, done.stdout)


def _words(name: str, line: str) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError:
        words = []
    if not words:
        raise PolicyError(f"the secret {name}: its command cannot be read", hint="write it as for a shell, with its quotes closed")
    return words


def _check_outside(what: str, path: str, shown: str, project: str | None) -> None:
    """Raise `PolicyError` if a path, with its links followed, lies in the project."""
    if project is not None and contains(os.path.realpath(project), os.path.realpath(path)):
        raise PolicyError(f"{what}: {shown} lies in the project, which an agent may have written", hint="keep it elsewhere")


def _text(name: str, data: bytes) -> str:
    if len(data) > MOST_BYTES:
        raise PolicyError(f"the secret {name} has more than {MOST_BYTES} bytes", hint="name what holds the secret alone")
    return data.decode("latin-1").strip("\r\n")
