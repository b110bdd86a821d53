"""Sections that close the report: data, environment, how to regenerate it, definitions."""

from collections.abc import Iterable, Sequence
from typing import Any

from shardlab.config.run_record import Record
from shardlab.config.timing_record import machines
from shardlab.report.evidence import Evidence
from shardlab.report.tables import Section, Table, facts, make_table, plural

_MANY = 4
"""distinct values up to this number are listed one by one"""


def data(evidence: Evidence) -> Section:
    """Show source, licence and statistics of the corpus."""
    return Section(
        "Data",
        tables=[
            make_table("Source", ["name", "value"], facts(evidence.source), layout="facts"),
            make_table(
                "Statistics of the corpus",
                ["name", "value"],
                facts(evidence.statistics),
                layout="facts",
            ),
        ],
    )


def environment(evidence: Evidence) -> Section:
    """Show host, versions and setting."""
    found = machines(evidence.timed)
    mixed = "; ".join(f"{', '.join(timings)} on {machine}" for machine, timings in found.items())
    return Section(
        "Environment",
        sentences=[f"Timings of {len(found)} machines, which differ in speed: {mixed}."]
        if len(found) > 1
        else [],
        tables=[
            make_table("Environment", ["name", "value"], setting(evidence.records), layout="facts")
        ],
    )


def regenerate(evidence: Evidence) -> Section:
    """Show the commands that regenerate the report."""
    return Section(
        "Regenerate",
        sentences=[
            "params.yaml describes the experiment. Either tool runs the stages that a change "
            "affects."
        ],
        tables=[
            make_table(
                "Regenerate",
                ["name", "value"],
                [("Snakemake", "snakemake --cores all"), ("DVC", "dvc repro")],
                layout="facts",
            )
        ],
    )


def definitions(tables: Iterable[Table]) -> Section:
    """Define the columns of all tables, each once."""
    meanings = {
        column.heading: column.meaning
        for table in tables
        for column in table.columns
        if column.meaning
    }
    return Section(
        "Definitions",
        sentences=[
            "Every run is trained with each seed; runs with the same seed start from the same "
            "weights and see the same data. Step times that are compared are those of timings; "
            "training gives losses, perplexities, bytes and traces. Intervals are not corrected "
            "for the number of runs that are compared."
        ],
        tables=[make_table("Definitions", ["column", "meaning"], meanings.items(), layout="text")],
    )


def distinct(values: Iterable[Any]) -> str:
    """Return the different values in their order, the first few by name."""
    texts = list(dict.fromkeys(str(value) for value in values))
    if len(texts) <= _MANY:
        return ", ".join(texts)
    return f"{', '.join(texts[:_MANY])} and {len(texts) - _MANY} more"


def setting(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return names and values of the setting; several values where the records differ."""

    def of(name: str) -> str:
        return distinct(getattr(record, name) for record in records)

    def host(name: str) -> str:
        return distinct(record.host[name] for record in records)

    return [
        ("CPU", host("cpu")),
        ("cores", host("cores")),
        ("memory", distinct(f"{r.host['memory_bytes'] / 2**30:.1f} GiB" for r in records)),
        ("kernel", host("kernel")),
        ("Python", host("python")),
        ("torch", of("torch")),
        ("kernels", of("kernels")),
        ("ranks", of("world_size")),
        ("link", of("link")),
        ("model", distinct(f"{r.model} ({r.parameters:,} parameters)" for r in records)),
        ("data", of("dataset")),
        ("steps", of("steps")),
        (
            "tokens per step",
            distinct(
                f"{r.world_size * r.batch_size * r.accumulation * r.sequence_length:,}"
                for r in records
            ),
        ),
        ("sequence length", of("sequence_length")),
        ("seeds", ", ".join(map(str, dict.fromkeys(r.seed for r in records)))),
        ("revision", of("revision")),
    ]


def setting_line(evidence: Evidence) -> str:
    """Return one line: host, seeds, steps, model, data, versions, and what was measured how."""
    values = dict(setting(evidence.records))
    repetitions = plural(int(evidence.compared["repetitions"].max()), "repetition")
    parts = [
        f"{values['CPU']} ({values['cores']} cores, {values['ranks']} ranks)",
        f"seed {values['seeds']}" if values["seeds"].isdigit() else f"seeds {values['seeds']}",
        f"{values['steps']} steps of {values['tokens per step']} tokens",
        values["model"],
        values["data"],
        f"torch {values['torch']}",
        f"revision {values['revision']}",
    ]
    return (
        f"Measured on {'; '.join(parts)}. Step times are of interleaved steps (timing "
        f"{evidence.comparison}, {repetitions}), bytes and quality of the training runs; ± is the "
        "standard deviation over repetitions or seeds, brackets hold the 95 % confidence interval "
        "of the paired comparison with the baseline."
    )
