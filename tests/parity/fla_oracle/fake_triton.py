"""A stand-in for Triton: kernels can be defined, decorated and looked up; launching one is an error."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from typing import Any


class _Anything:
    """Answers to any attribute, call or subscript, so that decorated kernel definitions can be executed."""

    def __init__(self, name: str = "triton") -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _jit if name == "jit" else _Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain_decorator = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if plain_decorator else _Anything(self.__name__)

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Any:
        return iter(())

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return ()


class _Kernel:
    """What `triton.jit` makes of a function: it can be defined, decorated and looked up, not launched."""

    def __init__(self, function: Any) -> None:
        self.fn, self.__name__, self.arg_names = function, function.__name__, []

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"the oracle does not replace the kernel {self.__name__}")


def _jit(function: Any = None, **options: Any) -> Any:
    return _Kernel(function) if function is not None else _Kernel


def _decorator(*args: Any, **kwargs: Any) -> Any:
    return lambda function: function


class _NoDriver:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no driver")


class _Autotuner:
    user_defined_pre_hook = user_defined_post_hook = True

    def __init__(self, fn: Any = None, *args: Any, **kwargs: Any) -> None:
        self.fn, self.configs, self.cache, self.keys = fn, [], {}, []


class _Config:
    def __init__(self, kwargs: Any = None, **options: Any) -> None:
        self.kwargs = kwargs or {}


class _Constexpr:
    def __init__(self, value: Any = None) -> None:
        self.value = value


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _jit if name == "jit" else _Anything(name)


class FakeTriton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `triton` and every module below it."""

    contents: dict[str, dict[str, Any]] = {
        "triton": {
            "__version__": "3.9.0",
            "jit": _jit,
            "autotune": _decorator,
            "heuristics": _decorator,
            "Config": _Config,
            "cdiv": lambda a, b: -(-a // b),
            "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
        },
        "triton.language": {
            "constexpr": _Constexpr,
            "dtype": type("dtype", (), {}),
            "tensor": type("tensor", (), {}),
        },
        "triton.runtime": {"driver": _NoDriver()},
        "triton.runtime.autotuner": {"Autotuner": _Autotuner},
    }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "triton" or name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        for name, value in self.contents.get(module.__name__, {}).items():
            setattr(module, name, value)
