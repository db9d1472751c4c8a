"""Libraries of stubs: what an object asks for is what it gets."""

import ctypes
import shutil
import subprocess

import pytest

from rstar_jax.planning import stubs
from rstar_jax.types import UserError

NEEDS = stubs.Needs(
    dynamic="""
 0x0000000000000001 (NEEDED)             Shared library: [librccl.so.1]
 0x0000000000000001 (NEEDED)             Shared library: [libamdhip64.so.7]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
""",
    versions="""
Version symbols section '.gnu.version' contains 4 entries:
Version needs section '.gnu.version_r' contains 2 entries:
 Addr: 0x0000000000006560  Offset: 0x00006560  Link: 6 (.dynstr)
  000000: Version: 1  File: libamdhip64.so.7  Cnt: 1
  0x00b0:   Name: hip_4.2  Flags: none  Version: 34
  0x0010: Version: 1  File: libc.so.6  Cnt: 1
  0x0170:   Name: GLIBC_2.2.5  Flags: none  Version: 10
""",
    symbols="""
                 U hipGetDeviceCount@hip_4.2
                 U ncclSend
                 U malloc@GLIBC_2.2.5
                 U _ZTIN10__cxxabiv115__forced_unwindE
                 w __gmon_start__
""",
)


def test_symbols_go_to_the_library_of_their_version_and_others_to_the_first():
    assert stubs.needed(NEEDS) == [
        stubs.Library("librccl.so.1", {"ncclSend": ""}),
        stubs.Library("libamdhip64.so.7", {"hipGetDeviceCount": "hip_4.2"}),
    ]


def test_libraries_of_one_name_are_one():
    merged = stubs.merge([stubs.Library("b", {"f": ""}), stubs.Library("a", {}), stubs.Library("b", {"g": "v1"})])
    assert merged == [stubs.Library("a", {}), stubs.Library("b", {"f": "", "g": "v1"})]


def test_a_missing_tool_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "gcc" else f"/usr/bin/{tool}")
    with pytest.raises(UserError, match="gcc not found: building the stub libraries takes gcc and binutils; install them"):
        stubs.build([tmp_path / "plugin.so"], tmp_path / "stubs")


@pytest.mark.skipif(any(shutil.which(tool) is None for tool in stubs.TOOLS), reason="gcc or binutils are missing")
def test_an_object_whose_library_is_missing_loads_with_stubs(tmp_path):
    def gcc(name, text, *options):
        (tmp_path / "a.c").write_text(text)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / name), str(tmp_path / "a.c"), *options], check=True)

    real = "int hipInit(unsigned f){return 7;} int hipFree(void *p){return 0;} int hipGetDeviceCount(int *n){*n = 3; return 0;}"
    (tmp_path / "versions").write_text("hip_4.2 { global: hipInit; hipGetDeviceCount; };")
    gcc("libhip.so", real, "-Wl,-soname,libhip.so.7", f"-Wl,--version-script={tmp_path / 'versions'}")
    declared = "int hipInit(unsigned); int hipFree(void *); int hipGetDeviceCount(int *);"
    wrapped = "int wInit(void){return hipInit(0);} int wFree(void){return hipFree(0);}"
    wrapped += "int wGetDeviceCount(int *n){return hipGetDeviceCount(n);}"
    gcc("plugin.so", declared + wrapped, "-L", str(tmp_path), "-lhip")
    (tmp_path / "libhip.so").unlink()
    with pytest.raises(OSError, match=r"libhip\.so\.7"):
        ctypes.CDLL(str(tmp_path / "plugin.so"))
    assert stubs.build([tmp_path / "plugin.so"], tmp_path / "stubs") == ["libhip.so.7"]
    ctypes.CDLL(str(tmp_path / "stubs" / "libhip.so.7"), mode=ctypes.RTLD_GLOBAL)
    plugin = ctypes.CDLL(str(tmp_path / "plugin.so"))
    count = ctypes.c_int(9)
    assert [plugin.wInit(), plugin.wFree(), plugin.wGetDeviceCount(ctypes.byref(count))] == [0, stubs.NO_DEVICE, 0]
    assert count.value == 0
