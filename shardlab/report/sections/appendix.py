"""Sections that close the report: data, environment, definitions."""

from collections.abc import Iterable, Sequence
from typing import Any

from shardlab.core.numbers import plural
from shardlab.report.evidence import Evidence
from shardlab.report.tables import ONE_DEVICE, Section, Table, facts_table, flatten, make_table
from shardlab.results.timing_result import machines
from shardlab.results.train_result import TrainResult

_MANY = 4
"""distinct values up to this number are listed one by one"""


def data(evidence: Evidence) -> Section:
    """Show source, licence and statistics of the corpus."""
    statistics = facts_table("Statistics of the corpus", flatten(evidence.statistics))
    # the parameters that it was made by are those of params.yaml; files may be thousands
    left_out = ("parameters", "files")
    source = {key: value for key, value in evidence.source.items() if key not in left_out}
    tables = [facts_table("Source", flatten(source)), statistics]
    return Section("Data", tables=tables, folded=True)


def environment(evidence: Evidence) -> Section:
    """Show host, versions and setting."""
    by_machine = machines(evidence.timed)
    names = "; ".join(f"{', '.join(timings)} on {name}" for name, timings in by_machine.items())
    several = f"Timings of {len(by_machine)} machines, which differ in speed: {names}."
    return Section(
        "Environment",
        sentences=[several] if len(by_machine) > 1 else [],
        tables=[facts_table("Environment", setting(evidence.records))],
        folded=True,
    )


def definitions(tables: Iterable[Table]) -> Section:
    """Define the columns of all tables, each once."""
    columns = [column for table in tables for column in table.columns if column.meaning]
    meanings = {column.heading: column.meaning for column in columns}
    return Section(
        "Definitions",
        sentences=[
            "Every run is trained with each seed; runs with the same seed start from the same "
            "weights and see the same data. Step times that are compared are those of timings; "
            "training gives losses, perplexities, bytes and traces. Intervals are not corrected "
            "for the number of runs that are compared."
        ],
        tables=[make_table("Definitions", ["column", "meaning"], meanings.items(), layout="text")],
        folded=True,
    )


def _distinct(values: Iterable[Any]) -> str:
    """Return the different values in their order, the first few by name."""
    texts = list(dict.fromkeys(str(value) for value in values))
    more = f" and {len(texts) - _MANY} more" if len(texts) > _MANY else ""
    return ", ".join(texts[:_MANY]) + more


def setting(records: Sequence[TrainResult]) -> list[tuple[str, str]]:
    """Return names and values of the setting; several values where the records differ."""

    def of(name: str) -> str:
        return _distinct(getattr(record, name) for record in records)

    def host(name: str) -> str:
        return _distinct(record.host[name] for record in records)

    tokens = (r.world_size * r.tokens_of_rank for r in records)
    return [
        ("CPU", host("cpu")),
        ("cores", host("cores")),
        ("memory", _distinct(f"{r.host['memory_bytes'] / 2**30:.1f} GiB" for r in records)),
        ("kernel", host("kernel")),
        ("Python", host("python")),
        ("torch", of("torch")),
        ("kernels", of("kernels")),
        ("ranks", of("world_size")),
        ("link", of("link")),
        ("model", _distinct(f"{r.model} ({r.parameters:,} parameters)" for r in records)),
        ("data", of("dataset")),
        ("steps", of("steps")),
        ("tokens per step", _distinct(f"{count:,}" for count in tokens)),
        ("sequence length", of("sequence_length")),
        ("seeds", ", ".join(dict.fromkeys(str(r.seed) for r in records))),
        ("revision", of("revision")),
    ]


def setting_line(evidence: Evidence) -> str:
    """Return one line: host, seeds, steps, model, data, versions, and what was measured how."""
    values = dict(setting(evidence.records))
    steps = evidence.main_steps
    most = steps.loc[steps["run"] != ONE_DEVICE, "repetitions"].max()
    repetitions = plural(int(most), "repetition")
    return (
        f"Measured on {values['CPU']} ({values['cores']} cores, {values['ranks']} ranks); "
        f"{'seed' if values['seeds'].isdigit() else 'seeds'} {values['seeds']}; "
        f"{values['steps']} steps of {values['tokens per step']} tokens; {values['model']}; "
        f"{values['data']}; torch {values['torch']}; revision {values['revision']}. Step times are "
        f"of interleaved steps (timing {evidence.main_timing}, {repetitions}), bytes and quality "
        "of the training runs; ± is the standard deviation over repetitions or seeds, brackets "
        "hold 95 % confidence intervals of comparisons over the repetitions of this one timing, or "
        "over seeds."
    )
