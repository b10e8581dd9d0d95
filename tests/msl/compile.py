"""From generated Metal source to a loaded shared library.

front end, once per kernel:   text -> prep -> clang -> unoptimised IR, language findings
check=True:                   IR -> -O1 -> irpass -> machine code
check=False:                  IR -> -O2 -> machine code
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from pathlib import Path

from .errors import CompileError, Finding, LintError
from .gen import ATTRIBUTES, Generated
from .irpass import Site, instrument
from .lint_ast import lint_ast, needs_ast
from .lint_ir import lint_ir
from .preamble import preamble
from .prep import rewrite
from .toolchain import (
    HERE,
    SHIM,
    cached_file,
    cached_folder,
    clang,
    digest,
    folder_digest,
    libc_headers,
    link,
    run,
    run_or_fail,
)

ENTRY = "mtl_entry"
# Kernel text is numbered from here for the compiler, so that a line number alone tells it from MLX's preamble.
FIRST_LINE = 100_001

_CODE = (
    "-march=x86-64-v3",
    "-fPIC",
    "-fstack-clash-protection",
    "-ffp-contract=off",
    "-fno-vectorize",
    "-fno-slp-vectorize",
)
_LANGUAGE = (
    *("-nostdinc", "-nostdlib", "-fno-builtin", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
    *("-fno-strict-aliasing", "-fvisibility=hidden", "-gline-tables-only", "-fconvergent-functions"),
    # unsuffixed literals are float, and every half and bfloat operation rounds
    *("-Xclang", "-cl-single-precision-constant"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    "-fsanitize=array-bounds,shift,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow,return",
    *("-fno-sanitize-trap=all", "-ftrivial-auto-var-init=pattern"),  # the pattern is NaN in every float type
    *("-fno-caret-diagnostics", "-fno-color-diagnostics", "-Wimplicit-float-conversion"),
    *("-Werror=vla", "-Werror=uninitialized", "-Wno-error=sometimes-uninitialized"),
)
# Everything is inlined, as on a GPU: two calls of a helper are two places in the program. A vector load of which one
# component is used stays a vector load, with its alignment.
_PASSES = ("-mllvm", "-inline-threshold=20000", "-mllvm", "-disable-vector-combine")
_FRONT_END = ("-O1", "-Xclang", "-disable-llvm-passes")
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


def locate(kernel: Generated, line: int) -> tuple[str, int]:
    """(part, line of that part) of a line number the compiler or the runtime reported."""
    return ("preamble", line) if line < FIRST_LINE else kernel.locate(line - FIRST_LINE + 1)


def is_user(file: str) -> bool:
    """Is this the file name of generated kernel text (not of a header)?"""
    return file.endswith(".metal")


@functools.cache
def sources_digest() -> str:
    """Changes whenever the compiler or any part of the emulator that shapes a kernel changes."""
    return digest(preamble(), folder_digest(SHIM), *clang(), *((HERE / f).read_bytes() for f in _SHAPING))


_SHAPING = ("compile.py", "irpass.py", "irtext.py", "lint_ast.py", "lint_ir.py", "prep.py", "lexer.py")


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime library, built once, its symbols visible to the kernels loaded later."""
    sources = sorted((HERE / "rt").glob("*.cpp"))
    options = ("-std=c++17", "-O2", "-g", "-march=x86-64-v3", "-fno-exceptions", "-fno-rtti", "-fPIC", *libc_headers())

    def build(folder: Path) -> None:
        objects = [folder / f"{source.stem}.o" for source in sources]
        for source, target in zip(sources, objects, strict=True):
            run_or_fail([*clang(), *options, "-c", str(source), "-o", str(target)], "building the runtime")
        link(objects, folder / "runtime.so")

    folder = cached_folder(f"runtime-{digest(folder_digest(HERE / 'rt'), *clang())}", build)
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "runtime.so"), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _language_flags(metal: int) -> tuple[str, ...]:
    standard = "c++14" if metal < 400 else "c++17"
    return (f"-std={standard}", f"-D__METAL_VERSION__={metal}", "-isystem", str(SHIM), *_CODE, *_LANGUAGE)


@functools.cache
def _precompiled_preamble(metal: int) -> Path:
    """The shim and MLX's preamble, parsed once: most of the time a small kernel takes to compile."""
    key = digest(sources_digest(), str(SHIM), *_language_flags(metal))
    header = cached_file(f"preamble-{key}.h", lambda path: path.write_text(preamble()))

    def build(path: Path) -> None:
        options = ("-x", "c++-header", "-fpch-instantiate-templates", "-Xclang", "-fno-pch-timestamp")
        options += (*_FRONT_END, *_language_flags(metal))
        run_or_fail([*clang(), *options, str(header), "-o", str(path)], "precompiling the preamble")

    return cached_file(f"preamble-{key}.pch", build)


class CompiledKernel:
    """A kernel loaded into this process. With `check` every memory access is instrumented."""

    def __init__(self, kernel: Generated, *, metal: int, check: bool, lint: bool) -> None:
        """CompileError if clang refuses the source; with `lint`, LintError for what Apple's compiler would refuse."""
        self.kernel = kernel
        self.check = check
        key = digest(kernel.text, str(metal), sources_digest())
        front = cached_folder(f"front-{key}", lambda folder: _front_end(folder, kernel, metal))
        findings = json.loads((front / "findings.json").read_text())
        if findings and lint:
            located = [Finding(rule, *locate(kernel, line), message) for rule, _, line, message in findings]
            raise LintError(kernel.kernel_name, located)
        back_end = _checked if check else _fast
        folder = cached_folder(f"kernel-{key}{back_end.__name__}", lambda folder: back_end(front / "kernel.ll", folder))
        self.sites = [Site(*site) for site in json.loads((folder / "sites.json").read_text())] if check else []
        runtime()
        try:
            self.library = ctypes.CDLL(str(folder / "kernel.so"))
        except OSError as error:  # a function that was declared but exists nowhere
            raise CompileError(f"{kernel.kernel_name}: {error}") from None
        self.entry = ctypes.cast(getattr(self.library, ENTRY), ctypes.c_void_p)


def _front_end(folder: Path, kernel: Generated, metal: int) -> None:
    source, module = folder / "kernel.cpp", folder / "kernel.ll"
    options = ("-x", "c++", *_FRONT_END, "-include-pch", str(_precompiled_preamble(metal)), *_language_flags(metal))
    body = rewrite(kernel.text)
    source.write_text(f'#line {FIRST_LINE} "kernel.metal"\n{body}\n#line 1 "entry point"\n{_entry_point(kernel)}')
    _require(kernel, *run([*clang(), *options, "-S", "-emit-llvm", str(source), "-o", str(module)]))
    findings = lint_ir(module.read_text(), is_user, ENTRY)
    if needs_ast(kernel.text):
        # in a namespace of its own, by which clang can select what to print
        spaced = folder / "spaced.cpp"
        spaced.write_text(f'namespace __mtl_user {{\n#line {FIRST_LINE} "kernel.metal"\n{body}\n}}\n')
        dump = ("-fsyntax-only", "-Xclang", "-ast-dump", "-Xclang", "-ast-dump-filter=__mtl_user")
        code, output = run([*clang(), *options, *dump, str(spaced)])
        _require(kernel, code, output if code else "")
        findings += lint_ast(output)
        spaced.unlink()
    (folder / "findings.json").write_text(json.dumps(findings))


def _entry_point(kernel: Generated) -> str:
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
        f'extern "C" __attribute__((visibility("default")))\n'
        f"void {ENTRY}(void **arguments, const __mtl_context *context) "
        f"{{ [[clang::noinline]] {kernel.instance}({', '.join(values)}); }}\n"
    )


def _require(kernel: Generated, code: int, output: str) -> None:
    """CompileError for errors, and for the implicit conversions to bfloat that clang allows and Metal does not."""
    messages = []
    for line in output.split("\n"):
        match = _DIAGNOSTIC.match(line)
        if match is None:
            continue
        file, number, column, severity, text = match.groups()
        where = f"{file}:{number}:{column}"
        if is_user(file):
            part, number = locate(kernel, int(number))
            where = f"{part} line {number}:{column}"
        if severity == "error":
            messages.append(f"{where}: {text}")
        elif is_user(file) and "implicit conversion" in text and "__bf16" in text:
            messages.append(f"{where}: {text} (Metal has no implicit conversion to bfloat)")
    if code or messages:
        details = "\n".join(messages) or output
        raise CompileError(f"{kernel.kernel_name}: unable to build the Metal library from source\n{details}")


def _back_end(module: Path, target: Path, *options: str) -> None:
    command = [*clang(), "-x", "ir", "-Wno-override-module", *_CODE, *options, str(module), "-o", str(target)]
    run_or_fail(command, "compiling the IR of a kernel")


def _fast(module: Path, folder: Path) -> None:
    _back_end(module, folder / "kernel.o", "-O2", *_PASSES, "-c")
    _finish(folder)


def _checked(module: Path, folder: Path) -> None:
    optimised, checked = folder / "optimised.ll", folder / "checked.ll"
    _back_end(module, optimised, "-O1", *_PASSES, "-S", "-emit-llvm")
    text, sites = instrument(optimised.read_text(), is_user, ENTRY)
    checked.write_text(text)
    (folder / "sites.json").write_text(json.dumps(sites))
    _back_end(checked, folder / "kernel.o", "-O0", "-c")
    _finish(folder)
    optimised.unlink()
    checked.unlink()


def _finish(folder: Path) -> None:
    link([folder / "kernel.o"], folder / "kernel.so")
    (folder / "kernel.o").unlink()
