"""Immutable values for the engine half, without the price of `dataclasses`.

Importing `dataclasses` and `typing` and generating a dozen classes by exec costs more than half
of what `hostprep exec` may take before it becomes the engine (benchmarks/startup.py). This does
what is needed of them; type checkers see a dataclass.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar, dataclass_transform

    T = TypeVar("T")

    @dataclass_transform(frozen_default=True)
    def value(cls: type[T]) -> type[T]: ...

    def replace(original: T, **changes: Any) -> T: ...

else:
    __all__ = ["replace", "value"]

    def value(cls):  # noqa: C901 - one closure a method
        """Give a class of annotated fields a constructor, equality, a hash and a repr.

        Fields are in order of annotation, defaults are class attributes and must be immutable.
        `__post_init__` may check; nothing may change a field afterwards.
        """
        fields = tuple(cls.__annotations__)
        defaults = {name: cls.__dict__[name] for name in fields if name in cls.__dict__}

        def __init__(self, *positional, **named):  # noqa: N807
            if len(positional) > len(fields):
                raise TypeError(f"{cls.__name__} has {len(fields)} fields, got {len(positional)}")
            given = dict(zip(fields, positional))
            for name in named:
                if name not in fields or name in given:
                    raise TypeError(f"{cls.__name__} has no field left of the name {name}")
            values = {**defaults, **given, **named}
            if len(values) < len(fields):
                missing = [name for name in fields if name not in values]
                raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}")
            self.__dict__.update(values)
            check = getattr(self, "__post_init__", None)
            if check is not None:
                check()

        def key(self):
            return tuple(self.__dict__[name] for name in fields)

        def __eq__(self, other):  # noqa: N807
            return key(self) == key(other) if type(other) is cls else NotImplemented

        def __repr__(self):  # noqa: N807
            shown = ", ".join(f"{name}={self.__dict__[name]!r}" for name in fields)
            return f"{cls.__name__}({shown})"

        def __setattr__(self, name, _value):  # noqa: ARG001, N807
            raise AttributeError(f"{cls.__name__}.{name} cannot be changed")

        cls.__init__ = __init__
        cls.__eq__ = __eq__
        cls.__hash__ = lambda self: hash(key(self))
        cls.__repr__ = __repr__
        cls.__setattr__ = __setattr__
        cls.__delattr__ = lambda self, name: self.__setattr__(name, None)
        return cls

    def replace(original, **changes):
        """Return a copy with some fields changed."""
        return type(original)(**{**original.__dict__, **changes})
