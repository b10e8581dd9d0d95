"""What a benchmark run leaves behind: machine, settings, rows; as JSON, and compared with an earlier one."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlxlin

if TYPE_CHECKING:
    from mlxlin.bench import Row

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        machine: what it ran on.
        model: what was measured.
        settings: lengths, tokens, repetitions, seed.
        bandwidth: bytes per second the memory gave, measured in this run.
        weight_bytes: bytes of weights read for every token.
        drift: see `mlxlin.bench.drift`.
        peers: versions of other subjects; greedy tokens they have in common with the first.
    """

    machine: dict[str, Any]
    model: dict[str, Any]
    settings: dict[str, Any]
    bandwidth: float
    weight_bytes: int
    drift: float
    peers: dict[str, Any]
    rows: list[Row]

    def share(self, row: Row) -> float:
        """Share of the measured bandwidth that decoding uses: weights, state read and written, keys and values."""
        return (self.weight_bytes + 2 * row.state_bytes + row.kv_bytes) * row.median / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        """Plain values; rates are written beside the seconds for whoever reads the file."""
        rows = [{**asdict(row), "median_tps": row.median, "spread": row.spread} for row in self.rows]
        return {"format": FORMAT, **{f.name: getattr(self, f.name) for f in fields(self)}, "rows": rows}


def read_record(path: Path) -> Record:
    """Read what `--json` wrote.

    Raises:
        InputError: no such file, or not one of these.
    """
    hint = "Give a file written by bench --json."
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        return Record(**(data | {"rows": [_row(row) for row in data["rows"]]}))
    except OSError as error:
        raise mlxlin.InputError(f"{path} cannot be read: {error.strerror}.", hint) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise mlxlin.InputError(f"{path} is no benchmark record: {error!r}.", hint) from error


def _row(data: dict[str, Any]) -> Row:
    from mlxlin.bench import Row

    values: dict[str, Any] = {f.name: _frozen(data[f.name]) for f in fields(Row)}
    return Row(**values)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Change:
    """One row against its earlier self: the ratio of the medians, and the ratio's range over all repetitions."""

    key: tuple[str, str, int]
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """In words: within the spread both are the same."""
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "same within the spread"


def compare(new: Iterable[Row], old: Iterable[Row]) -> list[Change]:
    """Rows that both runs have, new over old."""
    before = {row.key: row for row in old}
    pairs = [(row, before[row.key]) for row in new if row.key in before]
    return [
        Change(
            row.key,
            row.median / was.median,
            min(row.rates) / max(was.rates),
            max(row.rates) / min(was.rates),
        )
        for row, was in pairs
    ]


def differences(new: Record, old: Record) -> list[str]:
    """What else changed between two runs than the speed."""
    pairs = [(new.machine, old.machine), (new.model, old.model), (new.settings, old.settings)]
    return [
        f"{key}: {was.get(key)} -> {now.get(key)}"
        for now, was in pairs
        for key in sorted({*now, *was})
        if now.get(key) != was.get(key)
    ]


def describe_machine() -> dict[str, Any]:
    """The machine as it matters for speed: the backend, processors, power source, and the commit of mlxlin."""
    return {
        **mlxlin.describe_backend(),
        "cores": os.cpu_count(),
        "power": power_source(),
        "load": round(os.getloadavg()[0], 2),
        "mlxlin": mlxlin.__version__,
        "commit": commit(),
    }


def power_source() -> str:
    """One of mains, battery, unknown."""
    if platform.system() == "Darwin":
        out = _output(["pmset", "-g", "batt"])
        return "mains" if "AC Power" in out else "battery" if "Battery Power" in out else "unknown"
    supplies = Path("/sys/class/power_supply")
    online = [path.read_text().strip() for path in supplies.glob("*/online")] if supplies.is_dir() else []
    return ("mains" if "1" in online else "battery") if online else "unknown"


def commit() -> str:
    """The commit of the work tree mlxlin runs from, "+" behind it where files differ from it; empty when installed."""
    folder = Path(mlxlin.__file__).resolve().parent
    found = _output(["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"])
    inside = _output(["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"])
    return found if inside else ""


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
