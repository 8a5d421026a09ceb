"""How asv's benchmarks are called, and in which units they are."""

from collections.abc import Callable


def recorded_as(module: str, **units: str) -> Callable[[type], type]:
    """A class decorator: asv's names of the benchmarks begin with `module`, wherever the class is.

    Recorded figures go by name, so a class can move to another file without losing its past.

    Args:
        module: what the name begins with.
        units: of benchmarks, by the name of the method.
    """

    def name(cls: type) -> type:
        for attribute, function in list(vars(cls).items()):
            if attribute.startswith(("track_", "time_")):
                function.benchmark_name = f"{module}.{cls.__name__}.{attribute}"
        for attribute, unit in units.items():
            vars(cls)[attribute].unit = unit
        return cls

    return name
