import os
import sys

from shardlab.forecast.announcement import announcement
from stages.summary import summarize


def show_announcement():
    """Say what the jobs take that are about to run."""
    jobs = {}
    for job in workflow.dag.needrun_jobs():
        if job.rule.name != "all":
            jobs.setdefault(job.rule.name, []).append(job.wildcards_dict)
    print(*announcement(PARAMETERS.complete(), jobs), sep="\n", file=sys.stderr)


def show_summary():
    if lines := summarize(os.getpid()):
        print(f"\n{lines}\n", file=sys.stderr)


onsuccess:
    show_summary()


onerror:
    show_summary()
