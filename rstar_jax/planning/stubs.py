"""Empty stand-ins for the ROCm libraries that XLA's plugin is linked to, so that it loads, and compiles, where no ROCm is.

A library of stubs is made from what the plugin itself says of the real one: the sonames it needs, and the symbols, with their
versions, that it expects to find there. Every function returns an error, but for the few that the plugin calls on its way to the
compiler (`ANSWERS`). They replace nothing at run time: without a device there is nothing to run.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence

from rstar_jax.types import UserError

TOOLS = ("gcc", "nm", "readelf")
SYSTEM_LIBRARIES = ("libc.", "libm.", "librt.", "libpthread.", "libdl.", "libstdc++.", "libgcc_s.", "ld-linux")
"""Beginnings of the sonames that every Linux has."""

NO_DEVICE = 100  # hipErrorNoDevice; an error in the other libraries too, whose success is 0
ANSWERS: Mapping[str, str] = {
    "hipInit": "(unsigned flags) { return 0; }",
    "hipGetDeviceCount": "(int *count) { *count = 0; return 0; }",
    "hipRuntimeGetVersion": "(int *version) { *version = 70200000; return 0; }",  # 7.2.0
    "hipDriverGetVersion": "(int *version) { *version = 70200000; return 0; }",
}
"""The bodies of the functions that succeed."""

_TEXT = re.compile(r"(Error(String|Name)|_to_string)$")  # of these a pointer to characters is expected


@dataclasses.dataclass(frozen=True)
class Library:
    """A library to build: its soname, and its functions as name -> symbol version ("" for none)."""

    soname: str
    functions: Mapping[str, str]


def build(objects: Sequence[pathlib.Path], output: pathlib.Path) -> list[str]:
    """Build into `output` what these shared objects need and no Linux has; the sonames. Raises `UserError` when a tool is missing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise UserError(f"{', '.join(missing)} not found: building the stub libraries takes gcc and binutils; install them")
    if not objects:
        raise UserError("no shared object to build stub libraries for; is the plugin installed?")
    libraries = merge(library for path in objects for library in needed(_read(path)))
    output.mkdir(parents=True, exist_ok=True)
    for library in libraries:
        compile_library(library, output / library.soname)
    return [library.soname for library in libraries]


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the tools print of one shared object: `readelf --dynamic`, `readelf --version-info` and `nm --dynamic`."""

    dynamic: str
    versions: str
    symbols: str


def _read(path: pathlib.Path) -> Needs:
    return Needs(
        _run("readelf", "--wide", "--dynamic", str(path)),
        _run("readelf", "--wide", "--version-info", str(path)),
        _run("nm", "--dynamic", "--undefined-only", str(path)),
    )


def needed(needs: Needs) -> list[Library]:
    """The libraries that one shared object needs. A symbol without a version may come from any of them: the first has it."""
    sonames = [name for name in re.findall(r"\(NEEDED\).*\[(.+)\]", needs.dynamic) if not name.startswith(SYSTEM_LIBRARIES)]
    if not sonames:
        return []
    homes: dict[str, str] = {}  # symbol version -> soname
    file = ""
    for line in needs.versions.partition("Version needs section")[2].splitlines():
        if found := re.search(r"File: (\S+)", line):
            file = found[1]
        elif found := re.search(r"Name: (\S+)", line):
            homes.setdefault(found[1], file)
    functions: dict[str, dict[str, str]] = {soname: {} for soname in sonames}
    for name, version in re.findall(r"^\s+U ([^@\s]+)@*(\S*)$", needs.symbols, re.MULTILINE):
        home = homes.get(version, "") if version else sonames[0]
        if home in functions and not name.startswith("_ZT"):  # type information is the C++ library's
            functions[home][name] = version
    return [Library(soname, functions[soname]) for soname in sonames]


def merge(libraries: Iterable[Library]) -> list[Library]:
    """One library for each soname, with the functions of all."""
    functions: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for library in libraries:
        functions[library.soname].update(library.functions)
    return [Library(soname, functions[soname]) for soname in sorted(functions)]


def source(library: Library) -> str:
    """The library's C text."""
    lines = []
    for name in sorted(library.functions):
        if name in ANSWERS:
            lines.append(f"int {name}{ANSWERS[name]}")
        elif _TEXT.search(name):
            lines.append(f'const char *{name}() {{ return "a stub library has no devices"; }}')
        else:
            lines.append(f"long {name}() {{ return {NO_DEVICE}; }}")
    return "\n".join([*lines, ""])


def version_script(library: Library) -> str:
    """The linker's version script; empty when no function has a version."""
    names = collections.defaultdict(list)
    for name, version in library.functions.items():
        names[version].append(name)
    return "".join(f"{version} {{ global: {'; '.join(sorted(names[version]))}; }};\n" for version in sorted(names) if version)


def compile_library(library: Library, output: pathlib.Path) -> None:
    """Compile and link one library of stubs."""
    with tempfile.TemporaryDirectory() as temporary:
        text, script = pathlib.Path(temporary) / "stubs.c", pathlib.Path(temporary) / "versions"
        text.write_text(source(library))
        script.write_text(version_script(library))
        versions = [f"-Wl,--version-script={script}"] if script.read_text() else []
        options = ["-shared", "-fPIC", "-O1", "-w", "-fno-builtin", f"-Wl,-soname,{library.soname}", *versions]
        _run("gcc", *options, "-o", str(output), str(text))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise UserError(f"{command[0]} failed on {command[-1]}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout
