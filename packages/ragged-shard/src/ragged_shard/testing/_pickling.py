"""Pickling that finds test modules by their file, since other processes cannot import them by name."""

import contextlib
import functools
import importlib.util
import inspect
import io
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any


def dumps(value: Any) -> bytes:
    """Pickle; functions and classes of modules that cannot be imported by name go as (name, file, qualified name)."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not types.FunctionType and not inspect.isclass(obj):
            return NotImplemented
        name = getattr(obj, "__module__", None)
        module = sys.modules.get(name) if isinstance(name, str) else None
        file = getattr(module, "__file__", None)
        qualname = obj.__qualname__
        if "<locals>" in qualname or "<lambda>" in qualname:
            raise TypeError(
                f"{qualname} of {file} cannot be sent to another process: make it a top-level function, and "
                "pass what it closes over as arguments"
            )
        if module is None or file is None or _importable(str(name), file):
            return NotImplemented
        shipped = "__ranks_main__" if name == "__main__" else name
        return _find, (shipped, os.path.abspath(file), os.stat(file).st_mtime_ns, qualname)


@functools.lru_cache(maxsize=4096)
def _importable(name: str, file: str) -> bool:
    """Whether ``import name`` in another process with this one's sys.path loads that file."""
    if name == "__main__":
        return False
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True
    path = os.path.abspath(file)
    stem = os.path.join(*name.split("."))
    for entry in sys.path:
        for candidate in (stem + ".py", os.path.join(stem, "__init__.py")):
            if os.path.join(os.path.abspath(entry or "."), candidate) == path:
                return True
    return not path.endswith(".py")


_loaded: dict[tuple[str, str], tuple[int, types.ModuleType]] = {}


def _find(name: str, file: str, changed: int, qualname: str) -> Any:
    """The object of that name; in a rank its module is loaded from its file, under the test process's name for it.

    In the test process, for results, the module exists already and must not be loaded twice with other classes.
    """
    key = (name, file)
    here = sys.modules.get("__main__" if name == "__ranks_main__" else name)
    if key not in _loaded and os.path.abspath(getattr(here, "__file__", None) or "") == file:
        assert here is not None
        _loaded[key] = (changed, here)
    if key not in _loaded or _loaded[key][0] != changed:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        previous = sys.modules.get(name)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            with contextlib.suppress(KeyError):
                del sys.modules[name]
            if previous is not None:
                sys.modules[name] = previous
            raise
        _loaded[key] = (changed, module)
    value: Any = _loaded[key][1]
    for part in qualname.split("."):
        value = getattr(value, part)
    return value


def where(fn: Any) -> str:
    """A function's name and file, for error messages."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inspect.unwrap(inner), "__code__", None)
    name = getattr(inner, "__qualname__", repr(inner))
    return f"{name} ({Path(code.co_filename).name})" if code else name
