"""From generated Metal source to a loaded shared library."""

from __future__ import annotations

import ctypes
import functools
import json
import re
from pathlib import Path

from .errors import CompileError
from .gen import ATTRIBUTES, Generated
from .irpass import Site, instrument
from .preamble import preamble
from .prep import rewrite
from .toolchain import HERE, SHIM, cached, clang, digest, folder_digest, libc_headers, link, run, run_or_fail

# Metal versions by macOS: 14 -> 3.1, 15 -> 3.2, 26 -> 4.0, 27 -> 4.1
METAL_VERSIONS = (310, 320, 400, 410)
ENTRY = "mtl_entry"

_MACHINE = ("-fPIC", "-march=x86-64-v3")
_LANGUAGE = (
    *("-x", "c++", "-nostdinc", "-nostdlib", "-fno-builtin", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
    # unsuffixed literals are float; every half and bfloat operation rounds; nothing is fused or vectorised behind our back
    *("-Xclang", "-cl-single-precision-constant"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    *("-ffp-contract=off", "-fno-vectorize", "-fno-slp-vectorize", "-fno-strict-aliasing", "-fvisibility=hidden"),
    *("-fno-caret-diagnostics", "-fno-color-diagnostics", "-Wno-everything", "-Wimplicit-float-conversion"),
    *("-Werror=vla", "-Werror=uninitialized", "-Werror=sometimes-uninitialized"),
)
_CHECKS = (
    "-fsanitize=array-bounds,shift,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow,return",
    "-fno-sanitize-trap=all",
    "-ftrivial-auto-var-init=pattern",  # NaN in every float type
)
# clang rounds float to bfloat through this compiler-rt function, which nothing links
_BFLOAT_ROUNDING = """
extern "C" __attribute__((weak, used)) __bf16 __truncsfbf2(float f) {
  unsigned u = __builtin_bit_cast(unsigned, f);
  bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  unsigned short r = (unsigned short)(is_nan ? (u >> 16) | 0x40 : (u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  return __builtin_bit_cast(__bf16, r);
}
"""
_SCALARS = [name for name, type_ in ATTRIBUTES.items() if type_ == "uint"]
_VECTORS = [name for name, type_ in ATTRIBUTES.items() if type_ == "uint3"]
_DIAGNOSTIC = re.compile(r"^(.*?):(\d+):(\d+): (?:fatal )?(error|warning): (.*)$")


def is_user(file: str) -> bool:
    """Is this the file name of generated kernel text (not of a header)?"""
    return file.endswith(".metal")


def language_flags(metal: int) -> tuple[str, ...]:
    standard = "c++14" if metal < 400 else "c++17"
    return (f"-std={standard}", f"-D__METAL_VERSION__={metal}", "-isystem", str(SHIM), *_LANGUAGE)


def entry_point(kernel: Generated, namespace: str = "") -> str:
    """A C function that unpacks the argument table and the attributes and calls the kernel."""
    members = "".join(f"unsigned {name}; " for name in _SCALARS) + "unsigned pad; "
    members += "".join(f"uint3 {name}; " for name in _VECTORS)
    values = []
    for i, argument in enumerate(kernel.arguments):
        const = "" if argument.kind == "out" else "const "
        pointer = f"({const}{argument.space} {argument.metal_type} *)(unsigned long)arguments[{i}]"
        values.append(f"*{pointer}" if argument.is_reference else pointer)
    values += [f"context->{name}" for name in kernel.attributes]
    return (
        f"struct __mtl_context {{ {members}}};\n{_BFLOAT_ROUNDING}"
        f'extern "C" __attribute__((visibility("default"))) void {ENTRY}(void **arguments, const __mtl_context *context) '
        f"{{ [[clang::noinline]] {namespace}{kernel.instance}({', '.join(values)}); }}\n"
    )


def translation_unit(kernel: Generated) -> str:
    return (
        f'{preamble()}\n#line 1 "{kernel.kernel_name}.metal"\n{rewrite(kernel.text)}\n'
        f'#line 1 "entry point"\n{entry_point(kernel)}'
    )


def raise_diagnostics(code: int, output: str) -> None:
    """CompileError for errors, and for the implicit conversions to bfloat that clang allows and Metal does not."""
    messages = []
    for line in output.split("\n"):
        match = _DIAGNOSTIC.match(line)
        if match is None:
            continue
        file, _, _, severity, text = match.groups()
        if severity == "error":
            messages.append(line)
        elif is_user(file) and "implicit conversion" in text and "__bf16" in text:
            messages.append(line.replace("warning: ", "error: ") + " (Metal has no implicit conversion to bfloat)")
    if code or messages:
        raise CompileError("Unable to build metal library from source\n" + ("\n".join(messages) or output))


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime library, built once, its symbols visible to the kernels loaded later."""
    sources = sorted((HERE / "rt").glob("*.cpp"))
    options = ("-std=c++17", "-O2", "-g", "-fno-exceptions", "-fno-rtti", "-fPIC", *libc_headers())

    def build(folder: Path) -> None:
        objects = [folder / f"{source.stem}.o" for source in sources]
        for source, target in zip(sources, objects):
            run_or_fail([*clang(), *options, "-c", str(source), "-o", str(target)], "building the runtime")
        link(objects, folder / "runtime.so")

    folder = cached(f"runtime-{digest(folder_digest(HERE / 'rt'), *clang())}", build)
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "runtime.so"), mode=ctypes.RTLD_GLOBAL)


class CompiledKernel:
    """A kernel loaded into this process. With `check` every memory access is instrumented."""

    def __init__(self, kernel: Generated, *, metal: int, check: bool) -> None:
        self.kernel = kernel
        self.check = check
        unit = translation_unit(kernel)
        flags = language_flags(metal)
        key = digest(unit, *flags, *clang(), str(check), folder_digest(SHIM), (HERE / "irpass.py").read_bytes())

        def build(folder: Path) -> None:
            (folder / "kernel.cpp").write_text(unit)
            _build_checked(folder, flags) if check else _build_fast(folder, flags)
            link([folder / "kernel.o"], folder / "kernel.so")

        folder = cached(f"kernel-{key}", build)
        self.sites = [Site(*site) for site in json.loads((folder / "sites.json").read_text())] if check else []
        runtime()
        try:
            self.library = ctypes.CDLL(str(folder / "kernel.so"))
        except OSError as error:  # a function that was declared but exists nowhere
            raise CompileError(f"{kernel.kernel_name}: {error}") from None
        self.entry = ctypes.cast(getattr(self.library, ENTRY), ctypes.c_void_p)


def _build_fast(folder: Path, flags: tuple[str, ...]) -> None:
    source, target = str(folder / "kernel.cpp"), str(folder / "kernel.o")
    raise_diagnostics(*run([*clang(), "-O2", *_MACHINE, *flags, "-c", source, "-o", target]))


def _build_checked(folder: Path, flags: tuple[str, ...]) -> None:
    plain, checked = folder / "kernel.ll", folder / "checked.ll"
    options = ("-O1", "-gline-tables-only", "-S", "-emit-llvm", *_MACHINE, *flags, *_CHECKS)
    raise_diagnostics(*run([*clang(), *options, str(folder / "kernel.cpp"), "-o", str(plain)]))
    module, sites = instrument(plain.read_text(), is_user, ENTRY)
    checked.write_text(module)
    (folder / "sites.json").write_text(json.dumps(sites))
    options = ("-O1", "-Xclang", "-disable-llvm-passes", *_MACHINE, "-Wno-override-module", "-x", "ir")
    run_or_fail([*clang(), *options, "-c", str(checked), "-o", str(folder / "kernel.o")], "compiling the checks")
