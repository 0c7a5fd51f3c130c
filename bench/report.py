"""What a bench found: lines while it runs, a table at its end, and a file of everything."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.load import Sample, Scenario
from bench.systems import OURS

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class GateReport:
    """How many answers of a mixed batch were wrong."""

    system: str
    slots: int
    asked: int
    wrong: tuple[str, ...]


def gate_line(report: GateReport) -> str:
    """One line."""
    if not report.wrong:
        return f"gate: {report.system}: all {report.asked} answers of the mixed batch are right"
    names = ", ".join(sorted(set(report.wrong)))
    return f"gate: {report.system}: {len(report.wrong)} of {report.asked} wrong: {names}"


def sample_line(sample: Sample) -> str:
    """One line."""
    return (
        f"{sample.system:16} {_mix(sample.scenario.adapters):12} x{sample.scenario.concurrent:<3}"
        f" {sample.tokens_per_s:8.1f} tok/s   load {sample.load_average:.1f}"
        f"   stolen {sample.stolen_s:.1f} s"
    )


def table(
    systems: Sequence[str],
    scenarios: Sequence[Scenario],
    samples: Sequence[Sample],
    gates: Sequence[GateReport],
) -> str:
    """Median tokens per second (least-most), and ours against the best of the others."""
    others = [name for name in systems if not name.startswith(OURS)]
    ours = [name for name in systems if name.startswith(OURS)]
    head = ["adapters", "concurrent", *systems] + (["ours / best other"] if ours and others else [])
    rows = []
    for scenario in scenarios:
        medians = {name: _median(samples, name, scenario) for name in systems}
        row = [_mix(scenario.adapters), str(scenario.concurrent)]
        row += [_cell(samples, name, scenario) for name in systems]
        if ours and others:
            best = max(medians[name] for name in others)
            row.append(f"{max(medians[name] for name in ours) / best:.2f}" if best else "")
        rows.append(row)
    lines = [_line(head), _line(["---"] * len(head)), *map(_line, rows), ""]
    return "\n".join(lines + [gate_line(gate) for gate in gates if gate.wrong])


def save(
    options: Mapping[str, Any],
    samples: Sequence[Sample],
    gates: Sequence[GateReport],
    report: str,
) -> Path:
    """Everything that `throughput` found; returns the file."""
    found = {
        "samples": [asdict(sample) for sample in samples],
        "gates": [asdict(gate) for gate in gates],
    }
    return keep("throughput", options, found, report)


def keep(bench: str, options: Mapping[str, Any], found: Mapping[str, Any], report: str) -> Path:
    """Everything as JSON below bench/results; returns the file."""
    RESULTS.mkdir(exist_ok=True)
    now = datetime.now(UTC)
    path = RESULTS / f"{bench}-{now:%Y%m%dT%H%M%SZ}.json"
    whole = {
        "at": now.isoformat(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform()},
        "options": {key: str(value) for key, value in options.items()},
        **found,
        "table": report.splitlines(),
    }
    path.write_text(json.dumps(whole, indent=1))
    return path


def _mix(adapters: int) -> str:
    return "base" if adapters == 0 else f"{adapters} adapter{'s' * (adapters > 1)}"


def _speeds(samples: Sequence[Sample], system: str, scenario: Scenario) -> list[float]:
    return [s.tokens_per_s for s in samples if s.system == system and s.scenario == scenario]


def _median(samples: Sequence[Sample], system: str, scenario: Scenario) -> float:
    return statistics.median(_speeds(samples, system, scenario) or [0.0])


def _cell(samples: Sequence[Sample], system: str, scenario: Scenario) -> str:
    speeds = _speeds(samples, system, scenario)
    if not speeds:
        return ""
    return f"{statistics.median(speeds):.1f} ({min(speeds):.1f}-{max(speeds):.1f})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
