import os
import sys

from shardlab.predict.announcement import announcement
from stages.snakemake_log import Job, recall, show_jobs
from stages.summary import summarize

asked = workflow.output_settings
# with these options Snakemake prints its own messages
CALM = workflow.is_main_process and not (
    asked.dryrun or asked.quiet or asked.verbose or asked.printshellcmds or asked.debug_dag
)
SHOWN = show_jobs(lambda: workflow.execution_settings is not None) if CALM else None


def show_announcement():
    """Say what the jobs take that are about to run, and show a bar of them."""
    needed = [job for job in workflow.dag.needrun_jobs() if job.rule.name != "all"]
    jobs = {job.jobid: Job(Path(job.log[0])) for job in needed}
    recall(jobs.values())
    times = [(job.rule.name, jobs[job.jobid].seconds) for job in needed]
    print(*announcement(PARAMETERS, times), sep="\n", file=sys.stderr)
    if SHOWN:
        SHOWN.begin(jobs)


# after a failure Snakemake closes the handler
onsuccess:
    if SHOWN:
        SHOWN.close()
    if lines := summarize(os.getpid()):
        print(f"\n{lines}\n", file=sys.stderr)
