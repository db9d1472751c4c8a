"""What a zygote does once, so that no child has to: take its tier, limit itself and its imports, preload modules and warm them up, and
lay its memory out so that a fork copies little. Standard library alone."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import os
import random
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rstar_jax.tools import child, syscalls
from rstar_jax.tools.sandbox import Sandbox

_WARM_UP_RUNS = 20
_HUGE_PAGE = 2 << 20


class AllowedPackages:
    """Finds the modules of allowed distributions, and no others of `site-packages`. The last finder of `sys.meta_path`."""

    def __init__(self, sites: Mapping[str, Sequence[str]]):
        self.directories = list(sites)
        self.names = {entry.partition(".")[0] for entries in sites.values() for entry in entries}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is None and name in self.names:
            return importlib.machinery.PathFinder.find_spec(name, self.directories, target)
        return None

    def find_distributions(self, context: Any) -> Iterable[Any]:
        """So that `importlib.metadata` knows the versions of what can be imported."""
        from importlib.metadata import DistributionFinder, MetadataPathFinder

        context = DistributionFinder.Context(name=context.name, path=self.directories)
        return MetadataPathFinder.find_distributions(context)


def _open_streams() -> None:
    """Open the standard streams that children will use: UTF-8, buffered by line, so that a call that is killed keeps what it
    printed. They are opened on a pipe, because a stream remembers whether it was opened on something that can seek."""
    read_end, write_end = os.pipe()
    for name, fd in (("stdout", 1), ("stderr", 2)):
        real = os.dup(fd)
        os.dup2(write_end, fd)
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.dup2(real, fd)
        os.close(real)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    stdin = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, stdin)
    os.close(read_end)
    os.close(write_end)


def _warm_up() -> None:
    """Run the interpreter's own path for a program, so that its caches fill here and not in every child anew."""
    for _ in range(_WARM_UP_RUNS):
        child.execute("x = 1\nprint(x + 1)\nx", {"__builtins__": builtins})
    del builtins._  # type: ignore[attr-defined]


# Run after a module is preloaded: what it imports, computes and caches at first use is then there in every call.
_EXERCISES = {
    "numpy": """
import numpy as np
a = np.arange(4.0).reshape(2, 2)
repr(a @ a + np.linalg.inv(a + np.eye(2))), str(a.sum()), np.linalg.eigvals(a), np.linalg.solve(a + np.eye(2), a[0]), a.mean(axis=0)
np.random.default_rng(0).normal(size=3), np.roots([1, -3, 2]), np.gcd(12, 18), np.array([1, 2, 3], dtype=object).sum(), np.sort(a[::-1])
""",
    "scipy": "import scipy.optimize, scipy.integrate, scipy.linalg, scipy.special, scipy.stats",
    "sympy": """
from sympy import *
x, y, z, n, k = symbols("x y z n k")
p, m = symbols("p m", positive=True, integer=True)
t, f = symbols("t", real=True), Function("f")
for equation in (x - 1, x**2 - 3*x + 2, x**3 - 6*x**2 + 11*x - 6, x**4 - 5*x**2 + 4, x**2 + x + 1, 2*x/3 - 5, sqrt(x + 1) - 3,
                 exp(x) - 2, log(x) - 1, sin(x) - Rational(1, 2), Eq(x**2, 2), 1/x + x - 2, Abs(t) - 3):
    str(solve(equation))
str(solve([x + y - 3, x - y - 1], [x, y])), str(solve([x**2 + y**2 - 5, x*y - 2], [x, y])), str(solveset(x**2 - 4, x, S.Reals))
str(linsolve([x + y - 3, x - y - 1], [x, y])), str(solve(x**2 < 4, x)), str(nsolve(cos(x) - x, x, 1)), str(roots(x**3 - 1, x))
str(simplify(sin(x)**2 + cos(x)**2)), str(simplify((x**2 - 1)/(x - 1))), str(expand((x + y)**3)), str(factor(x**3 - y**3))
str(apart(1/(x**2 - 1))), str(together(1/x + 1/y)), str(cancel((x**2 - 1)/(x + 1))), str(radsimp(1/(sqrt(2) + 1)))
str(trigsimp(tan(x)*cos(x)))
str(integrate(x**2*exp(x), x)), str(integrate(1/(1 + x**2), (x, 0, oo))), str(diff(sin(x)*exp(x), x, 2)), str(limit(sin(x)/x, x, 0))
str(series(exp(x), x, 0, 4)), str(summation(k, (k, 1, n))), str(summation(1/k**2, (k, 1, oo))), str(product(k, (k, 1, 5)))
str(Poly(x**3 + 2*x, x).all_coeffs()), str(div(x**3 - 1, x - 1)), str(gcd(x**2 - 1, x - 1)), str(resultant(x**2 - 2, x - y, x))
str(factorint(360)), isprime(97), nextprime(100)
str(divisors(28)), totient(36), gcd(12, 18), lcm(4, 6), mod_inverse(3, 11), binomial(10, 3)
str(N(pi, 20)), str(Rational(1, 3) + sqrt(2)), str(nsimplify(0.5)), str((1 + I)**2), str(re(1 + I)), floor(Rational(7, 2))
str(sqrt(8).evalf())
M = Matrix([[1, 2], [3, 4]])
str(M.det()), str(M.inv()), str(M.eigenvals()), str(M.rref()), str(M * M), str(M.T)
str(x.subs(x, 2)), lambdify(x, x**2, "math")(2.0), str(Sum(k, (k, 1, 3)).doit()), str(Piecewise((x, x > 0), (0, True)))
str(latex(x**2/2)), pretty(x**2/2)
str(dsolve(f(x).diff(x) - f(x), f(x))), str(Interval(0, 1).intersect(Interval(Rational(1, 2), 2))), str(p + m > 0)
str(sympify("x**2 + 1"))
str(geometry.Point(0, 0).distance(geometry.Point(3, 4))), str(geometry.Circle((0, 0), 1).area), str(diophantine(3*x + 5*y - 1))
str(symbols("a:3")), str(cos(pi/3)), str(tan(pi/4)), str(log(8, 2)), str(factorial(10)), str(fibonacci(10)), str(Mod(17, 5))
str(root(27, 3))
""",
}


def _preload(names: Sequence[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
            exec(_EXERCISES.get(name, ""), {})
        except Exception as error:  # an import runs code, which can raise anything
            raise ImportError(f"tool.preload={name} cannot be imported: {type(error).__name__}: {error}") from error
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _collapse(maps: int) -> None:
    """Move private anonymous memory onto huge pages: what a fork costs is the number of its pages. `maps`: a descriptor of
    /proc/self/maps. A kernel without the means leaves things as they are."""
    content = b""
    while chunk := os.pread(maps, 1 << 20, len(content)):
        content += chunk
    for line in content.decode().splitlines():
        fields = line.split(maxsplit=5)
        if fields[1] == "rw-p" and fields[4] == "0" and (len(fields) == 5 or fields[5] == "[heap]"):
            start, end = (int(bound, 16) for bound in fields[0].split("-"))
            start = -(-start // _HUGE_PAGE) * _HUGE_PAGE
            for page in range(start, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                syscalls.collapse(page, _HUGE_PAGE)


def _limit_zygote(settings: dict[str, Any]) -> None:
    """Limits that calls inherit."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when the host runs out of memory, a call dies and not the trainer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (settings["disk_bytes"], settings["disk_bytes"]))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (child.MAX_FDS if hard < 0 else min(child.MAX_FDS, hard), hard))


def _restrict_imports(settings: dict[str, Any]) -> None:
    """The standard library, allowed packages, and what a program writes into its own directory."""
    keep = (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter, importlib.machinery.PathFinder)
    sys.meta_path[:] = [*keep, AllowedPackages(settings["sites"])]
    sys.path[:] = ["", *settings["standard_library"]]
    sys.path_importer_cache.clear()
    sys.argv[:] = [""]


def _trim() -> None:
    """Give free memory back, so that it is not copied at each fork."""
    with contextlib.suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def _fill_holes() -> list[object]:
    """Take the free places that lie between objects in use, for good. A call then allocates from fresh pages, one after another,
    instead of writing into a hole here and there, each of which would copy a page of the preloaded modules. Returns what fills the
    interpreter's own pools; the C library's holes (where it can count them: glibc 2.33) need nobody to hold them."""
    filling: list[object] = [[object() for _ in range(1024)], [float(i) for i in range(1024)]]
    empty = sys.getsizeof(b"")
    filling += [[bytes(size - empty) for _ in range(1024 if size <= 80 else 256)] for size in range(48, 513, 16)]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype, libc.malloc.restype, libc.malloc.argtypes = _MallocInfo, ctypes.c_void_p, [ctypes.c_size_t]

        size = 1 << 16  # less than what has a mapping of its own
        while size >= 24:
            before = libc.mallinfo2()
            if before.fordblks - before.keepcost < size or libc.malloc(size) is None or libc.mallinfo2().keepcost != before.keepcost:
                size = size * 3 // 4  # no hole is that large: it came from the end of the heap
    return filling


def prepare(settings: dict[str, Any], sandbox: Sandbox) -> int:
    """Everything that children inherit and so need not do again. Returns a descriptor of the list of this process's children, -1
    where the kernel cleans up."""
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    _limit_zygote(settings)
    maps = os.open("/proc/self/maps", os.O_RDONLY)
    children = -1 if sandbox.has_process_namespace else os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
    sandbox.enter()
    settings["pid"] = os.getpid()
    _restrict_imports(settings)
    _open_streams()
    _warm_up()
    _preload(settings["preload"])
    sandbox.seal()
    gc.collect()
    settings["filling"] = _fill_holes()
    gc.disable()
    gc.freeze()  # a collection in a child would write to, and so copy, every page of the preloaded modules
    _trim()
    _collapse(maps)
    os.close(maps)
    return children
