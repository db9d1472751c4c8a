"""What a call can see of this machine: the interpreter, the system's libraries, the allowed distributions and what each requires."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Iterable

from rstar_jax.types import UserError

_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclasses.dataclass(frozen=True)
class View:
    """`trees`: files and directories. `standard_library`: the directories that its modules are imported from. `sites`: of each
    directory of packages the entries that may be seen."""

    trees: tuple[str, ...]
    standard_library: tuple[str, ...]
    sites: dict[str, list[str]]


def view(packages: Iterable[str], readable: Iterable[str]) -> View:
    """The view for the settings `tool.packages` and `tool.readable`. Raises `UserError` for what does not exist."""
    readable = [os.path.abspath(path) for path in readable]
    for path in readable:
        if not os.path.exists(path):
            raise UserError(f"tool.readable={path} does not exist")
    standard = sysconfig.get_path("stdlib")
    library = (standard, f"{standard}/lib-dynload")
    environment = [f"{sys.prefix}/bin", f"{sys.prefix}/pyvenv.cfg"] if sys.prefix != sys.base_prefix else []
    linked = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    trees = (*_SYSTEM, sys.base_prefix, sys.base_exec_prefix, *library, *environment, *linked, *readable)
    return View(tuple(dict.fromkeys(trees)), library, _entries(packages))


def _entries(packages: Iterable[str]) -> dict[str, list[str]]:
    """By directory, the top-level entries of the distributions and of all that they require."""
    sites: dict[str, set[str]] = {}
    seen: set[str] = set()
    # (name, who requires it): what is asked for has to be there, what a requirement lacks its owner knows to do without
    waiting = [(name, "") for name in packages]
    while waiting:
        name, requirer = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if requirer:
                continue
            raise UserError(f"tool.packages={name} is not installed; install it or leave it out") from None
        files = distribution.files
        if files is None:
            raise UserError(f"tool.packages={name} has no list of its files; install it with pip or leave it out")
        site = os.path.realpath(str(distribution.locate_file("")))
        tops = {file.parts[0] for file in files if file.parts[0] not in ("..", "/", "__pycache__")}
        sites.setdefault(site, set()).update(top for top in tops if os.path.exists(f"{site}/{top}"))
        for requirement in distribution.requires or ():
            specification, _, marker = requirement.partition(";")
            match = _REQUIREMENT.match(specification.strip())
            if match and "extra" not in marker:
                waiting.append((match[0], name))
    return {site: sorted(names) for site, names in sites.items()}
