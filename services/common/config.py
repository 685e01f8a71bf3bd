"""Configuration: one frozen dataclass per service, filled from four places, the last wins.

Defaults, then a YAML file (`--config FILE`), then variables `PELAGOS_<SERVICE>_<KEY>`, then flags
`--key value`. An unknown key, a bad type or a bad value is a `ConfigError` with one clear line.
Nested dataclasses: `runtime.etcd` in YAML is a mapping, as a variable `..._RUNTIME_ETCD`, as a flag
`--runtime.etcd`. Lists: YAML lists, or comma-separated text.

    @dataclass(frozen=True)
    class PrefillConfig:
        listen: str = "127.0.0.1:7201"
        step_budget_ms: float = 30.0    # time one forward step may take
        api_token: str = secret("")     # never printed
        runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

        def __post_init__(self) -> None:
            require(self.step_budget_ms > 0, "step_budget_ms must be above 0")
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import yaml

ConfigT = TypeVar("ConfigT")
Path_ = tuple[str, ...]

_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})
_REDACTED: Final = "(set)"


class ConfigError(Exception):
    """A configuration that must not start; its text is one line for the operator."""


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless the condition holds; for `__post_init__`."""
    if not condition:
        raise ValueError(message)


def secret(default: Any = dataclasses.MISSING) -> Any:
    """Declares a field whose value is never printed, logged or shown on the admin plane."""
    return dataclasses.field(default=default, metadata={"secret": True})


def weakens(default: Any, what: str) -> Any:
    """Declares a field that weakens a default; a value other than it is warned about at start."""
    return dataclasses.field(default=default, metadata={"weakens": what})


@dataclass(frozen=True)
class Loaded(Generic[ConfigT]):
    """What the command line asked for, and the configuration it led to."""

    config: ConfigT
    check_only: bool
    print_only: bool


def load(
    config_cls: type[ConfigT],
    service: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    other_services: Collection[str] = (),
) -> Loaded[ConfigT]:
    """Returns the configuration of `service`, or raises ConfigError.

    Args:
        argv: flags after `pelagos serve NAME`.
        environ: the process environment; only `PELAGOS_<SERVICE>_*` is read.
        other_services: names whose longer prefix is theirs (PREFILL_LB_* is not PREFILL_*).
    """
    fields = _leaf_types(config_cls)
    flags, file, check_only, print_only = _parse_flags(argv, fields)
    values: dict[Path_, Any] = {}
    if file is not None:
        values.update(_read_file(Path(file), config_cls))
    values.update(_read_environ(service, environ, other_services, fields))
    values.update(flags)
    config = _construct(config_cls, values, ())
    return Loaded(config, check_only, print_only)


def from_mapping(config_cls: type[ConfigT], document: Mapping[str, Any]) -> ConfigT:
    """Returns the configuration of an already parsed document; for tests and the launcher."""
    return _construct(config_cls, _flatten(document, config_cls, ()), ())


def to_document(config: object, *, redact: bool = True) -> dict[str, Any]:
    """Returns the configuration as plain values; secrets as "(set)" or "" when `redact`."""
    document: dict[str, Any] = {}
    for item in dataclasses.fields(cast(Any, config)):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            document[item.name] = to_document(value, redact=redact)
        elif redact and item.metadata.get("secret"):
            document[item.name] = _REDACTED if value else ""
        else:
            document[item.name] = _plain(value)
    return document


def weakened(config: object, prefix: str = "") -> list[str]:
    """Returns one warning for each `weakens` field that is not at its default."""
    warnings: list[str] = []
    for item in dataclasses.fields(cast(Any, config)):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            warnings += weakened(value, f"{prefix}{item.name}.")
        elif "weakens" in item.metadata and value != item.default:
            warnings.append(f"{prefix}{item.name}: {item.metadata['weakens']}")
    return warnings


def usage(config_cls: type[Any], service: str) -> str:
    """Returns the help text: every key with its type and default."""
    lines = [
        f"usage: pelagos serve {service} [--config FILE] [--check-config] [--print-config]",
        f"       [--key value ...]   or PELAGOS_{_env_name(service)}_<KEY>",
        "",
    ]
    for path, (hint, default, _) in sorted(_leaf_types(config_cls).items()):
        shown = "required" if default is dataclasses.MISSING else f"default {_plain(default)!r}"
        lines.append(f"  --{'.'.join(path):<36} {_type_name(hint)}, {shown}")
    return "\n".join(lines)


# ---- the four sources -------------------------------------------------------------------------


def _parse_flags(
    argv: Sequence[str], fields: Mapping[Path_, tuple[Any, Any, bool]]
) -> tuple[dict[Path_, Any], str | None, bool, bool]:
    by_flag = {".".join(path): path for path in fields}
    values: dict[Path_, Any] = {}
    file: str | None = None
    check_only = print_only = False
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            raise ConfigError(f"unexpected argument {arg!r}: flags look like --key value")
        name, has_value, text = arg[2:].partition("=")
        name = name.replace("-", "_")
        if name == "check_config":
            check_only = True
            continue
        if name == "print_config":
            print_only = True
            continue
        path = by_flag.get(name)
        if path is None and name.startswith("no_") and by_flag.get(name[3:]) is not None:
            path, has_value, text = by_flag[name[3:]], "=", "false"
        if path is None and name != "config":
            raise ConfigError(f"unknown flag --{arg[2:].partition('=')[0]}{_close(name, by_flag)}")
        is_bool = path is not None and _strip_optional(fields[path][0])[0] is bool
        if not has_value:
            if is_bool and (not rest or rest[0].startswith("--")):
                text = "true"
            elif rest:
                text = rest.pop(0)
            else:
                raise ConfigError(f"flag --{name} needs a value")
        if path is None:
            file = text
        else:
            values[path] = _from_text(text, fields[path][0], f"flag --{name}")
    return values, file, check_only, print_only


def _read_environ(
    service: str,
    environ: Mapping[str, str],
    other_services: Collection[str],
    fields: Mapping[Path_, tuple[Any, Any, bool]],
) -> dict[Path_, Any]:
    prefix = f"PELAGOS_{_env_name(service)}_"
    foreign = tuple(
        other
        for name in other_services
        if (other := f"PELAGOS_{_env_name(name)}_") != prefix and other.startswith(prefix)
    )
    by_name = {prefix + "_".join(path).upper(): path for path in fields}
    assert len(by_name) == len(fields), "two keys share one variable name"
    values: dict[Path_, Any] = {}
    for name, text in environ.items():
        if not name.startswith(prefix) or (foreign and name.startswith(foreign)):
            continue
        path = by_name.get(name)
        if path is None:
            raise ConfigError(f"unknown variable {name}{_close(name, by_name)}")
        values[path] = _from_text(text, fields[path][0], f"variable {name}")
    return values


def _read_file(file: Path, config_cls: type[Any]) -> dict[Path_, Any]:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"{file} is not YAML: {where}") from None
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise ConfigError(f"{file} holds a {type(document).__name__}, not a mapping of keys")
    return _flatten(document, config_cls, ())


def _flatten(document: Mapping[str, Any], config_cls: type[Any], prefix: Path_) -> dict[Path_, Any]:
    hints = _hints(config_cls)
    values: dict[Path_, Any] = {}
    for key, value in document.items():
        path = (*prefix, str(key))
        where = ".".join(path)
        if key not in hints:
            raise ConfigError(f"unknown key {where}{_close(str(key), hints)}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where} must be a mapping, not {value!r}")
            values.update(_flatten(value, cast(type[Any], hint), path))
        else:
            values[path] = _check(value, hint, where)
    return values


# ---- types ------------------------------------------------------------------------------------


def _hints(config_cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(config_cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(config_cls)}


def _leaf_types(config_cls: type[Any], prefix: Path_ = ()) -> dict[Path_, tuple[Any, Any, bool]]:
    """Returns type, default and "is secret" of every plain key, by path."""
    leaves: dict[Path_, tuple[Any, Any, bool]] = {}
    hints = _hints(config_cls)
    for item in dataclasses.fields(config_cls):
        path = (*prefix, item.name)
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            leaves.update(_leaf_types(cast(type[Any], hint), path))
            continue
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        leaves[path] = (hint, default, bool(item.metadata.get("secret")))
    return leaves


def _construct(config_cls: type[ConfigT], values: Mapping[Path_, Any], prefix: Path_) -> ConfigT:
    kwargs: dict[str, Any] = {}
    hints = _hints(config_cls)
    for item in dataclasses.fields(cast(Any, config_cls)):
        path = (*prefix, item.name)
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            if any(key[: len(path)] == path for key in values):
                default = item.default_factory
                start = default() if default is not dataclasses.MISSING else None
                kwargs[item.name] = _overlay(cast(type[Any], hint), start, values, path)
        elif path in values:
            kwargs[item.name] = values[path]
        elif item.default is item.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{'.'.join(path)} is required and has no default")
    try:
        return config_cls(**kwargs)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{'.'.join(prefix) + ': ' if prefix else ''}{error}") from None


def _overlay(
    config_cls: type[Any], start: object | None, values: Mapping[Path_, Any], prefix: Path_
) -> Any:
    """Returns a nested config: what the parent's default_factory made, with `values` over it."""
    if start is None:
        return _construct(config_cls, values, prefix)
    merged = dict(_known_values(start, prefix))
    merged.update({k: v for k, v in values.items() if k[: len(prefix)] == prefix})
    return _construct(config_cls, merged, prefix)


def _known_values(config: object, prefix: Path_) -> dict[Path_, Any]:
    values: dict[Path_, Any] = {}
    for item in dataclasses.fields(cast(Any, config)):
        value = getattr(config, item.name)
        path = (*prefix, item.name)
        if dataclasses.is_dataclass(value):
            values.update(_known_values(value, path))
        else:
            values[path] = value
    return values


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(inner) == 1:
            return inner[0], True
    return hint, False


def _from_text(text: str, hint: Any, where: str) -> Any:
    """Returns the value of a flag or variable; text becomes what the type says."""
    inner, optional = _strip_optional(hint)
    if optional and text.lower() in ("", "null", "none"):
        return None
    origin = typing.get_origin(inner)
    if origin in (list, tuple):
        items = [part.strip() for part in text.split(",") if part.strip()]
        item_hint = typing.get_args(inner)[0]
        return origin(_from_text(part, item_hint, where) for part in items)
    if origin is dict:
        pairs = (part.split("=", 1) for part in text.split(",") if part.strip())
        try:
            value_hint = typing.get_args(inner)[1]
            return {k.strip(): _from_text(v.strip(), value_hint, where) for k, v in pairs}
        except ValueError:
            raise ConfigError(f"{where}: {text!r} is not key=value,key=value") from None
    if inner is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
    elif inner in (int, float):
        try:
            return _check(inner(text), inner, where)
        except ValueError:
            pass
    elif typing.get_origin(inner) is typing.Literal and text not in typing.get_args(inner):
        for choice in typing.get_args(inner):
            if str(choice) == text:
                return choice
    else:
        return _check(text, hint, where)
    raise ConfigError(f"{where}: {text!r} is not {_type_name(hint)}")


def _check(value: Any, hint: Any, where: str) -> Any:
    """Returns the value in the field's type; an int passes for a float, nothing else converts."""
    inner, optional = _strip_optional(hint)
    if value is None and optional:
        return None
    origin = typing.get_origin(inner)
    if inner is Any:
        return value
    if origin in (list, tuple) and isinstance(value, list | tuple):
        item_hint = typing.get_args(inner)[0]
        return origin(_check(v, item_hint, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        key_hint, value_hint = typing.get_args(inner)
        return {
            _check(k, key_hint, where): _check(v, value_hint, f"{where}.{k}")
            for k, v in value.items()
        }
    if origin is typing.Literal and value in typing.get_args(inner):
        return value
    if inner is float and isinstance(value, int | float) and not isinstance(value, bool):
        if value == value and abs(value) != float("inf"):
            return float(value)
    elif (
        (inner is int and isinstance(value, int) and not isinstance(value, bool))
        or (inner is bool and isinstance(value, bool))
        or (inner is str and isinstance(value, str))
    ):
        return value
    elif inner is Path and isinstance(value, str | Path):
        return Path(value)
    elif isinstance(inner, type) and issubclass(inner, enum.Enum):
        if isinstance(value, inner):
            return value
        for member in inner:
            if value in (member.value, member.name):
                return member
    raise ConfigError(f"{where}: {value!r} is not {_type_name(hint)}")


def _type_name(hint: Any) -> str:
    inner, optional = _strip_optional(hint)
    if typing.get_origin(inner) is typing.Literal:
        name = "one of " + ", ".join(str(arg) for arg in typing.get_args(inner))
    elif isinstance(inner, type) and issubclass(inner, enum.Enum):
        name = "one of " + ", ".join(str(member.value) for member in inner)
    else:
        name = str(inner) if typing.get_origin(inner) else getattr(inner, "__name__", str(inner))
    return f"{name} or null" if optional else name


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _env_name(service: str) -> str:
    return service.upper().replace("-", "_")


def _close(name: str, known: Mapping[str, Any]) -> str:
    """Returns a hint for a misspelt key, or nothing."""
    import difflib

    best = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {best[0]}?)" if best else ""
